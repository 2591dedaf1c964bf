"""The contents of a generateContent request as chat messages."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any, Final

from token_id_capture.server.dialects.chat import History, arguments_text
from token_id_capture.server.dialects.fields import (
    InvalidRequestError,
    read_flag,
    read_object,
    read_objects,
    read_text,
    shown,
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
        self._ids: set[str] = set()
        self._called: defaultdict[str, deque[str]] = defaultdict(deque)
        self._answered: set[str] = set()
        self._looked_through = 0

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
        contents = read_objects(body.get("contents"), "contents")
        if not contents:
            raise InvalidRequestError("contents", "at least one content is required")
        for content in contents:
            role = content.get("role", "user")
            try:
                parts = read_objects(content.get("parts"), "parts")
                if role == "model":
                    self._add_model(parts)
                elif role in ("user", "function"):
                    self._add_user(parts)
                else:
                    raise unsupported(role, "role", "roles are user and model")
            except InvalidRequestError as error:
                error.within("contents", contents, content)
                raise
        return self._messages

    def _add_user(self, parts: list[dict[str, Any]]) -> None:
        shown: list[dict[str, Any]] = []
        has_results = False
        for part in parts:
            try:
                if (result := part.get("functionResponse")) is not None:
                    has_results = True
                    self._add_result(read_object(result, "functionResponse"), shown)
                else:
                    shown.append(_user_part(part))
            except InvalidRequestError as error:
                error.within("parts", parts, part)
                raise
        if shown or not has_results:
            self._messages.append({"role": "user", "content": content_of(shown)})

    def _add_result(self, result: dict[str, Any], shown: list[dict[str, Any]]) -> None:
        call_id = result.get("id")
        if call_id is None or read_text(call_id, "functionResponse.id") not in self._ids:
            call_id = self._first_unanswered(read_text(result.get("name"), "functionResponse.name"))
        response = read_object(result.get("response") or {}, "functionResponse.response")
        output = response.get("output")
        text = output if len(response) == 1 and isinstance(output, str) else arguments_text(response)
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        if result.get("parts"):
            shown.extend(_shown_with_result(result["parts"]))

    def _first_unanswered(self, name: str) -> str:
        """The call that a response without an id belongs to. Most have one, so calls are put in order only here."""
        for message in self._messages[self._looked_through :]:
            for call in message.get("tool_calls", ()):
                self._called[call["function"]["name"]].append(call["id"])
            if message["role"] == "tool":
                self._answered.add(message["tool_call_id"])
        self._looked_through = len(self._messages)
        waiting = self._called[name]
        while waiting:
            if (call_id := waiting.popleft()) not in self._answered:
                return call_id
        raise InvalidRequestError(
            "functionResponse.name", f"no earlier part calls {shown(name)} and is without a response"
        )

    def _add_model(self, parts: list[dict[str, Any]]) -> None:
        text = thoughts = sealed = ""
        calls: list[dict[str, Any]] = []
        for part in parts:
            try:
                if "thoughtSignature" in part:
                    sealed += self._unsealed(part["thoughtSignature"])
                if (call := part.get("functionCall")) is not None:
                    calls.append(self._call(read_object(call, "functionCall")))
                elif part.get("text") is not None:
                    if part.get("thought") is not None and read_flag(part["thought"], "thought"):
                        thoughts += read_text(part["text"], "text")
                    else:
                        text += read_text(part["text"], "text")
                elif part.keys() - {"thought", "thoughtSignature"}:
                    raise unsupported(_kind(part), "", "a model's parts are text, thoughts and functionCall")
            except InvalidRequestError as error:
                error.within("parts", parts, part)
                raise
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
        if reasoning := sealed or thoughts:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        self._messages.append(message)

    def _unsealed(self, signature: Any) -> str:
        return (opened(signature) or "") if self._opens_seals else ""

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        name = read_text(call.get("name"), "functionCall.name")
        # An id made from the place is the same in each later request, so prompts only grow.
        call_id = call.get("id")
        call_id = f"call_{len(self._ids)}" if call_id is None else read_text(call_id, "functionCall.id")
        self._ids.add(call_id)
        arguments = arguments_text(read_object(call.get("args") or {}, "functionCall.args"))
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _system_text(instruction: Any, field: str) -> str:
    if isinstance(instruction, str):
        return instruction
    parts = read_objects(read_object(instruction, field).get("parts"), f"{field}.parts")
    return "\n".join(read_text(part.get("text"), (field, "parts", index, "text")) for index, part in enumerate(parts))


def _user_part(part: dict[str, Any]) -> dict[str, Any]:
    if part.get("text") is not None:
        return text_part(read_text(part["text"], "text"))
    if part.get("inlineData") is not None:
        data = read_object(part["inlineData"], "inlineData")
        media = _image_type(data, "inlineData")
        content = read_text(data.get("data"), "inlineData.data")
        return image_part(f"data:{media};base64,{content}")
    if part.get("fileData") is not None:
        data = read_object(part["fileData"], "fileData")
        _image_type(data, "fileData")
        return image_part(read_text(data.get("fileUri"), "fileData.fileUri"))
    raise unsupported(_kind(part), "", "a user's parts are text, images and functionResponse")


def _shown_with_result(value: Any) -> Iterator[dict[str, Any]]:
    parts = read_objects(value, "functionResponse.parts")
    for part in parts:
        try:
            yield _user_part(part)
        except InvalidRequestError as error:
            error.within("functionResponse.parts", parts, part)
            raise


def _image_type(data: dict[str, Any], field: str) -> str:
    media = read_text(data.get("mimeType"), f"{field}.mimeType")
    if not re.match("image/", media):
        raise unsupported(media, f"{field}.mimeType", "media are images")
    return media


def _kind(part: dict[str, Any]) -> str:
    return next((name for name in _UNSUPPORTED if name in part), None) or ", ".join(sorted(part)) or "an empty part"
