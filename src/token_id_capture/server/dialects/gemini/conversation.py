"""The contents of a generateContent request as chat messages."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

from token_id_capture.server.dialects.chat import History, arguments_text
from token_id_capture.server.dialects.fields import (
    InvalidRequestError,
    Place,
    read_flag,
    read_list,
    read_object,
    read_text,
    unsupported,
)
from token_id_capture.server.dialects.parts import content_of, image_part, text_part
from token_id_capture.server.dialects.seal import opened

_UNSUPPORTED: Final = ("executableCode", "codeExecutionResult", "toolCall", "toolResponse")


class Conversation:
    """Reads the contents in order, and finds the call of each function response."""

    def __init__(self, history: History) -> None:
        self._opens_seals = history is not History.OFF
        self._messages: list[dict[str, Any]] = []
        self._calls = 0
        self._ids: set[str] = set()
        self._open: dict[str, OrderedDict[str, None]] = {}

    def read(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The messages of ``systemInstruction`` and ``contents``.

        Raises:
            InvalidRequestError: a part has no place in a chat completion.
        """
        spellings = [name for name in ("systemInstruction", "system_instruction") if body.get(name) is not None]
        if len(spellings) > 1:
            raise InvalidRequestError(spellings[1], f"{spellings[0]} is given too")
        for name in spellings:
            if text := _system_text(body[name], name):
                self._messages.append({"role": "system", "content": text})
        contents = read_list(body.get("contents"), "contents")
        if not contents:
            raise InvalidRequestError("contents", "at least one content is required")
        for index, item in enumerate(contents):
            content = read_object(item, ("contents", index))
            field = ("contents", index, "parts")
            parts = read_list(content.get("parts"), field)
            role = content.get("role", "user")
            if role == "model":
                self._add_model(parts, field)
            elif role in ("user", "function"):
                self._add_user(parts, field)
            else:
                raise unsupported(role, ("contents", index, "role"), "roles are user and model")
        return self._messages

    def _add_user(self, parts: list[Any], field: Place) -> None:
        shown: list[dict[str, Any]] = []
        results = 0
        for index, item in enumerate(parts):
            part = read_object(item, (field, index))
            if (result := part.get("functionResponse")) is not None:
                results += 1
                self._add_result(result, (field, index, "functionResponse"), shown)
            else:
                shown.append(_user_part(part, (field, index)))
        if shown or not results:
            self._messages.append({"role": "user", "content": content_of(shown)})

    def _add_result(self, value: Any, field: Place, shown: list[dict[str, Any]]) -> None:
        result = read_object(value, field)
        name = read_text(result.get("name"), (field, "name"))
        waiting = self._open.get(name)
        call_id = result.get("id")
        if call_id is not None and read_text(call_id, (field, "id")) in self._ids:
            if waiting:
                waiting.pop(call_id, None)
        elif waiting:
            call_id, _ = waiting.popitem(last=False)
        else:
            raise InvalidRequestError((field, "name"), f"no earlier part calls {name!r} and is without a response")
        response = read_object(result.get("response") or {}, (field, "response"))
        output = response.get("output")
        text = output if len(response) == 1 and isinstance(output, str) else arguments_text(response)
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        if result.get("parts"):
            for index, part in enumerate(read_list(result["parts"], (field, "parts"))):
                place = (field, "parts", index)
                shown.append(_user_part(read_object(part, place), place))

    def _add_model(self, parts: list[Any], field: Place) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        sealed: list[str] = []
        calls: list[dict[str, Any]] = []
        for index, item in enumerate(parts):
            place = (field, index)
            part = read_object(item, place)
            signature = part.get("thoughtSignature") if self._opens_seals else None
            if signature is not None and (thought := opened(signature)) is not None:
                sealed.append(thought)
            if (call := part.get("functionCall")) is not None:
                calls.append(self._call(call, (place, "functionCall")))
            elif part.get("text") is not None:
                is_thought = part.get("thought") is not None and read_flag(part["thought"], (place, "thought"))
                (thoughts if is_thought else texts).append(read_text(part["text"], (place, "text")))
            elif part.keys() - {"thought", "thoughtSignature"}:
                raise unsupported(_kind(part), place, "a model's parts are text, thoughts and functionCall")
        text = "".join(texts)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
        if reasoning := "".join(sealed or thoughts):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        self._messages.append(message)

    def _call(self, value: Any, field: Place) -> dict[str, Any]:
        call = read_object(value, field)
        name = read_text(call.get("name"), (field, "name"))
        # An id made from the place is the same in each later request, so prompts only grow.
        call_id = call.get("id")
        call_id = f"call_{self._calls}" if call_id is None else read_text(call_id, (field, "id"))
        self._calls += 1
        self._ids.add(call_id)
        if name not in self._open:
            self._open[name] = OrderedDict()
        self._open[name][call_id] = None
        arguments = arguments_text(read_object(call.get("args") or {}, (field, "args")))
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _system_text(instruction: Any, field: Place) -> str:
    if isinstance(instruction, str):
        return instruction
    parts = read_list(read_object(instruction, field).get("parts"), (field, "parts"))
    places = ((read_object(part, (field, "parts", index)), index) for index, part in enumerate(parts))
    return "\n".join(read_text(part.get("text"), (field, "parts", index, "text")) for part, index in places)


def _user_part(part: dict[str, Any], field: Place) -> dict[str, Any]:
    if part.get("text") is not None:
        return text_part(read_text(part["text"], (field, "text")))
    if part.get("inlineData") is not None:
        data = read_object(part["inlineData"], (field, "inlineData"))
        media = _image_type(data, (field, "inlineData"))
        content = read_text(data.get("data"), (field, "inlineData", "data"))
        return image_part(f"data:{media};base64,{content}")
    if part.get("fileData") is not None:
        data = read_object(part["fileData"], (field, "fileData"))
        _image_type(data, (field, "fileData"))
        return image_part(read_text(data.get("fileUri"), (field, "fileData", "fileUri")))
    raise unsupported(_kind(part), field, "a user's parts are text, images and functionResponse")


def _image_type(data: dict[str, Any], field: Place) -> str:
    media = read_text(data.get("mimeType"), (field, "mimeType"))
    if not re.match("image/", media):
        raise unsupported(media, (field, "mimeType"), "media are images")
    return media


def _kind(part: dict[str, Any]) -> str:
    return next((name for name in _UNSUPPORTED if name in part), None) or ", ".join(sorted(part)) or "an empty part"
