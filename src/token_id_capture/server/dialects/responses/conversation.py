"""The input items of a Responses request as chat messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from token_id_capture.builder.content import CUSTOM_INPUT, function_name
from token_id_capture.server.dialects.chat import ClientTool, History, arguments_text
from token_id_capture.server.dialects.fields import (
    InvalidRequestError,
    read_objects,
    read_text,
    shown,
    unsupported,
)
from token_id_capture.server.dialects.parts import content_of, image_part, text_part
from token_id_capture.server.dialects.seal import opened

_TEXTS: Final = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_ITEMS: Final = "items are messages, reasoning, function calls, custom tool calls and their outputs"
_BLANK_LINE: Final = "\n\n"


class Conversation:
    """Reads the items in order. Those of one generation become one assistant message."""

    def __init__(self, history: History, tools: Mapping[str, ClientTool]) -> None:
        self._opens_seals = history is not History.OFF
        self._tools = tools
        self._messages: list[dict[str, Any]] = []
        self._calls: set[str] = set()
        self._assistant: dict[str, Any] | None = None
        self._images: list[dict[str, Any]] = []

    def read(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The messages of ``instructions`` and ``input``.

        Raises:
            InvalidRequestError: an item has no place in a chat completion.
        """
        if body.get("instructions") is not None:
            self._add_system(read_text(body["instructions"], "instructions"))
        if isinstance(body.get("input"), str):
            self._messages.append({"role": "user", "content": body["input"]})
        else:
            items = read_objects(body.get("input"), "input")
            for item in items:
                try:
                    self._add(item)
                except InvalidRequestError as error:
                    error.within("input", items, item)
                    raise
            self._end_results()
        if not self._messages:
            raise InvalidRequestError("input", "at least one item is required")
        for message in self._messages:
            if message["role"] == "assistant" and not message["content"]:
                message["content"] = None if "tool_calls" in message else ""
        return self._messages

    def _add(self, item: dict[str, Any]) -> None:
        kind = item.get("type", "message")
        if kind == "function_call":
            self._add_call(item, read_text(item.get("arguments"), "arguments"))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._add_output(item)
        elif kind == "message":
            self._add_message(item)
        elif kind == "reasoning":
            self._add_reasoning(item)
        elif kind == "custom_tool_call":
            self._add_call(item, arguments_text({CUSTOM_INPUT: read_text(item.get("input"), "input")}))
        elif kind == "item_reference":
            raise InvalidRequestError("type", "the gateway keeps no earlier items; send the whole input")
        else:
            raise unsupported(kind, "type", _ITEMS)

    def _add_message(self, item: dict[str, Any]) -> None:
        role = item.get("role")
        parts = _parts(item.get("content"), "content")
        if role == "assistant":
            message = self._generation()
            message["content"] = (message["content"] or "") + _joined(parts, "")
            return
        self._end_results()
        if role == "user":
            self._messages.append({"role": "user", "content": content_of(parts)})
        elif role in ("system", "developer"):
            self._add_system(_joined(parts, "\n"))
        else:
            raise unsupported(role, "role", "roles are user, assistant, system and developer")

    def _add_system(self, text: str) -> None:
        """A run of them at the beginning is one message, since many templates take only one."""
        if len(self._messages) == 1 and self._messages[0]["role"] == "system":
            self._messages[0]["content"] += _BLANK_LINE + text
        else:
            self._messages.append({"role": "system", "content": text})

    def _add_reasoning(self, item: dict[str, Any]) -> None:
        text = self._reasoning(item)
        message = self._generation()
        if message["content"] is not None or "tool_calls" in message:
            self._assistant = None  # a model reasons first, so this is the next generation
            message = self._generation()
        if text:
            message["reasoning_content"] = message.get("reasoning_content", "") + text

    def _reasoning(self, item: dict[str, Any]) -> str:
        sealed = opened(item.get("encrypted_content")) if self._opens_seals else None
        if sealed is not None:
            return sealed
        for name in ("content", "summary"):
            if item.get(name) is not None and (text := _joined(_parts(item[name], name), "")):
                return text
        return ""

    def _add_call(self, item: dict[str, Any], arguments: str) -> None:
        call_id = read_text(item.get("call_id"), "call_id")
        name = read_text(item.get("name"), "name")
        namespace = read_text(item["namespace"], "namespace") if item.get("namespace") is not None else None
        self._calls.add(call_id)
        function = {"name": function_name(name, namespace), "arguments": arguments}
        calls = self._generation().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def _add_output(self, item: dict[str, Any]) -> None:
        call_id = read_text(item.get("call_id"), "call_id")
        if call_id not in self._calls:
            raise InvalidRequestError("call_id", f"no earlier item is a tool call with the id {shown(call_id)}")
        output = item.get("output")
        if isinstance(output, str):
            text = output
        else:
            parts = _parts(output, "output")
            text = _joined(parts, "\n")
            self._images.extend(part for part in parts if part["type"] != "text")
        self._assistant = None
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _end_results(self) -> None:
        """What follows is not a tool output: the images of those before it become a user message."""
        self._assistant = None
        if self._images:
            self._messages.append({"role": "user", "content": self._images})
            self._images = []

    def _generation(self) -> dict[str, Any]:
        """The assistant message that this item belongs to."""
        if self._assistant is None:
            self._end_results()
            self._assistant = {"role": "assistant", "content": None}
            self._messages.append(self._assistant)
        return self._assistant


def _parts(content: Any, field: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [text_part(content)]
    parts: list[dict[str, Any]] = []
    for part in read_objects(content, field):
        try:
            parts.append(_part(part))
        except InvalidRequestError as error:
            error.within(field, content, part)
            raise
    return parts


def _part(part: dict[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if isinstance(kind, str) and kind in _TEXTS:
        return text_part(read_text(part.get("text"), "text"))
    if kind == "refusal":
        return text_part(read_text(part.get("refusal"), "refusal"))
    if kind == "input_image":
        return image_part(read_text(part.get("image_url"), "image_url"))
    raise unsupported(kind, "type", "parts are texts and images")


def _joined(parts: list[dict[str, Any]], separator: str) -> str:
    """The texts among ``parts``."""
    return separator.join(part["text"] for part in parts if part["type"] == "text")
