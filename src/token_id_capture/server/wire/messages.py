"""Assistant messages as content items, the same from a complete response and from a stream's deltas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from token_id_capture.records import TOKEN_FIELDS
from token_id_capture.server.engines.base import PROVIDER_FIELDS

# What engines say of the tokens of a choice, where LiteLLM moved it to the message.
_MOVED_TOKENS: Final = frozenset({*TOKEN_FIELDS, "logprobs", "response_token_ids", "token_ids", "weight_versions"})


def message_item(message: Mapping[str, Any]) -> dict[str, Any]:
    """The content item of a message: without token arrays and without members that say nothing.

    Empty content beside tool calls or reasoning is null. Engines write both, and the first delta of
    a stream has an empty content in either case.
    """
    said = {
        key: value for key, value in message.items() if value is not None and value != [] and key not in TOKEN_FIELDS
    }
    if isinstance(moved := said.pop(PROVIDER_FIELDS, None), Mapping):
        kept = {key: value for key, value in moved.items() if value is not None and key not in _MOVED_TOKENS}
        said |= {PROVIDER_FIELDS: kept} if kept else {}
    content = said.pop("content", "")
    others = said.keys() - {"role", "type"}
    item = {"type": "message", "role": said.pop("role", "assistant"), "content": content}
    if content == "" and others:
        item["content"] = None
    return {**item, **said}


class MessageMerger:
    """Merges the deltas of one choice into its message.

    Texts are joined, tool calls by their ``index``; of other values the last one stays. Tool-call
    arguments stay exactly the text that was produced.
    """

    def __init__(self) -> None:
        self._role: str | None = None
        self._texts: dict[str, list[str]] = {}
        self._values: dict[str, Any] = {}
        self._calls: dict[int, _CallMerger] = {}

    def add(self, delta: Mapping[str, Any]) -> None:
        """Take the next delta."""
        for key, value in delta.items():
            if value is None:
                continue
            if key == "role":
                self._role = value
            elif key == "tool_calls" and isinstance(value, list):
                self._add_calls(value)
            elif isinstance(value, str):
                self._texts.setdefault(key, []).append(value)
            else:
                self._values[key] = value

    def message(self) -> dict[str, Any]:
        """The message so far."""
        message: dict[str, Any] = {"role": self._role, **self._values}
        message.update((key, "".join(pieces)) for key, pieces in self._texts.items())
        if self._calls:
            message["tool_calls"] = [call.call() for _, call in sorted(self._calls.items())]
        return message

    def _add_calls(self, deltas: list[Any]) -> None:
        for position, delta in enumerate(deltas):
            if isinstance(delta, Mapping):
                index = delta.get("index")
                key = index if type(index) is int else position
                self._calls.setdefault(key, _CallMerger()).add(delta)


class _CallMerger:
    def __init__(self) -> None:
        self._members: dict[str, Any] = {}
        self._function: dict[str, Any] = {}
        self._arguments: list[str] = []

    def add(self, delta: Mapping[str, Any]) -> None:
        self._members.update((key, value) for key, value in delta.items() if value is not None and key != "index")
        function = delta.get("function")
        if not isinstance(function, Mapping):
            return
        for key, value in function.items():
            if key == "arguments" and isinstance(value, str):
                self._arguments.append(value)
            elif value is not None:
                self._function[key] = value

    def call(self) -> dict[str, Any]:
        function = {"arguments": "", **self._function}
        if self._arguments:
            function["arguments"] = "".join(self._arguments)
        return {"type": "function", **self._members, "function": function}
