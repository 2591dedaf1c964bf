"""The contents of a generateContent request as chat messages."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from token_id_capture.server.dialects.chat import History, arguments_text
from token_id_capture.server.dialects.fields import (
    InvalidRequestError,
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
        self._open: dict[str, deque[str]] = {}

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
            content = read_object(item, f"contents.{index}")
            parts = read_list(content.get("parts"), f"contents.{index}.parts")
            read = [read_object(part, f"contents.{index}.parts.{position}") for position, part in enumerate(parts)]
            role = content.get("role", "user")
            if role == "model":
                self._add_model(read, f"contents.{index}.parts")
            elif role in ("user", "function"):
                self._add_user(read, f"contents.{index}.parts")
            else:
                raise unsupported(role, f"contents.{index}.role", "roles are user and model")
        return self._messages

    def _add_user(self, parts: list[dict[str, Any]], field: str) -> None:
        shown: list[dict[str, Any]] = []
        results = 0
        for index, part in enumerate(parts):
            if part.get("functionResponse") is not None:
                results += 1
                place = f"{field}.{index}.functionResponse"
                self._add_result(read_object(part["functionResponse"], place), place, shown)
            else:
                shown.append(_user_part(part, f"{field}.{index}"))
        if shown or not results:
            self._messages.append({"role": "user", "content": content_of(shown)})

    def _add_result(self, result: dict[str, Any], field: str, shown: list[dict[str, Any]]) -> None:
        name = read_text(result.get("name"), f"{field}.name")
        waiting = self._open.get(name)
        call_id = result.get("id")
        if call_id is not None and read_text(call_id, f"{field}.id") in self._ids:
            if waiting and call_id in waiting:
                waiting.remove(call_id)
        elif waiting:
            call_id = waiting.popleft()
        else:
            raise InvalidRequestError(f"{field}.name", f"no earlier part calls {name!r} and is without a response")
        response = read_object(result.get("response") or {}, f"{field}.response")
        output = response.get("output")
        text = output if len(response) == 1 and isinstance(output, str) else arguments_text(response)
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        for index, part in enumerate(read_list(result.get("parts") or [], f"{field}.parts")):
            place = f"{field}.parts.{index}"
            shown.append(_user_part(read_object(part, place), place))

    def _add_model(self, parts: list[dict[str, Any]], field: str) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        sealed: list[str] = []
        calls: list[dict[str, Any]] = []
        for index, part in enumerate(parts):
            place = f"{field}.{index}"
            if self._opens_seals and (thought := opened(part.get("thoughtSignature"))) is not None:
                sealed.append(thought)
            if part.get("functionCall") is not None:
                call = read_object(part["functionCall"], f"{place}.functionCall")
                calls.append(self._call(call, f"{place}.functionCall"))
            elif part.get("text") is not None:
                is_thought = part.get("thought") is not None and read_flag(part["thought"], f"{place}.thought")
                (thoughts if is_thought else texts).append(read_text(part["text"], f"{place}.text"))
            elif part.keys() - {"thought", "thoughtSignature"}:
                raise unsupported(_kind(part), place, "a model's parts are text, thoughts and functionCall")
        text = "".join(texts)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
        if reasoning := "".join(sealed or thoughts):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        self._messages.append(message)

    def _call(self, call: dict[str, Any], field: str) -> dict[str, Any]:
        name = read_text(call.get("name"), f"{field}.name")
        # An id made from the place is the same in each later request, so prompts only grow.
        call_id = read_text(call["id"], f"{field}.id") if call.get("id") is not None else f"call_{self._calls}"
        self._calls += 1
        self._ids.add(call_id)
        self._open.setdefault(name, deque()).append(call_id)
        arguments = arguments_text(read_object(call.get("args") or {}, f"{field}.args"))
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _system_text(instruction: Any, field: str) -> str:
    if isinstance(instruction, str):
        return instruction
    parts = read_list(read_object(instruction, field).get("parts"), f"{field}.parts")
    places = ((read_object(part, f"{field}.parts.{index}"), index) for index, part in enumerate(parts))
    return "\n".join(read_text(part.get("text"), f"{field}.parts.{index}.text") for part, index in places)


def _user_part(part: dict[str, Any], field: str) -> dict[str, Any]:
    if part.get("text") is not None:
        return text_part(read_text(part["text"], f"{field}.text"))
    if part.get("inlineData") is not None:
        data = read_object(part["inlineData"], f"{field}.inlineData")
        media = _image_type(data, f"{field}.inlineData")
        return image_part(f"data:{media};base64,{read_text(data.get('data'), f'{field}.inlineData.data')}")
    if part.get("fileData") is not None:
        data = read_object(part["fileData"], f"{field}.fileData")
        _image_type(data, f"{field}.fileData")
        return image_part(read_text(data.get("fileUri"), f"{field}.fileData.fileUri"))
    raise unsupported(_kind(part), field, "a user's parts are text, images and functionResponse")


def _image_type(data: dict[str, Any], field: str) -> str:
    media = read_text(data.get("mimeType"), f"{field}.mimeType")
    if not re.match("image/", media):
        raise unsupported(media, f"{field}.mimeType", "media are images")
    return media


def _kind(part: dict[str, Any]) -> str:
    return next((name for name in _UNSUPPORTED if name in part), None) or ", ".join(sorted(part)) or "an empty part"
