"""What a model said, in a form in which two tellings of it can be compared. Pure.

A chat message, the items of the Responses API and the blocks of Anthropic's Messages that say the same give the same.
Thoughts do not count, because harnesses drop them. The gateway translates a custom tool of Responses to a function with
one text, and joins a namespace to the tool's name: both tellings are equal.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

Said = tuple[str, ...]
"""Texts and tool calls in order, each with its kind in front."""

_TEXT_PARTS: Final = ("text", "output_text", "input_text", "refusal")
_THOUGHTS: Final = ("thinking", "redacted_thinking")
_CALLS: Final = ("function_call", "custom_tool_call")
CUSTOM_INPUT: Final = "input"
"""The one parameter of the function that stands for a custom tool."""


def said(items: Iterable[Any]) -> Said:
    """What the model authored of these items: text parts and tool calls."""
    return tuple(part for item in items if isinstance(item, Mapping) for part in _parts(item))


def is_model_authored(item: Any) -> bool:
    """Whether the model said it: an assistant's message or a tool call."""
    if not isinstance(item, Mapping):
        return False
    return item.get("role") == "assistant" or item.get("type") in _CALLS


def is_tool_result(item: Any) -> bool:
    """Whether it is what a tool answered."""
    if not isinstance(item, Mapping):
        return False
    if item.get("role") == "tool" or item.get("type") in ("function_call_output", "custom_tool_call_output"):
        return True
    blocks = item.get("content") if item.get("role") == "user" else None
    return isinstance(blocks, list) and any(
        isinstance(block, Mapping) and block.get("type") == "tool_result" for block in blocks
    )


def function_name(name: str, namespace: str | None) -> str:
    """The engine's name for a tool of a namespace of Responses."""
    return name if namespace is None else f"{namespace}__{name}"


def is_reasoning(item: Any) -> bool:
    """Whether it is a thought alone."""
    return isinstance(item, Mapping) and item.get("type") == "reasoning"


def _parts(item: Mapping[str, Any]) -> Iterator[str]:
    if not is_model_authored(item) and not (item.get("type") == "message" and "role" not in item):
        return
    if item.get("type") in _CALLS:
        name, namespace = item.get("name"), item.get("namespace")
        if isinstance(name, str) and isinstance(namespace, str):
            name = function_name(name, namespace)
        yield _call(item.get("call_id") or item.get("id"), name, item.get("arguments", item.get("input")))
        return
    content = item.get("content")
    for part in [content] if isinstance(content, str) else content if isinstance(content, list) else []:
        if isinstance(part, Mapping) and part.get("type") == "tool_use":
            yield _call(part.get("id"), part.get("name"), part.get("input"))
        elif text := part if isinstance(part, str) else _text_of(part):
            yield f"text {text}"
    for call in item.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            yield _call(call.get("id"), function.get("name"), function.get("arguments"))


def _text_of(part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS:
        text = part.get("text", part.get("refusal"))
        return text if isinstance(text, str) else ""
    if isinstance(part, Mapping) and part.get("type") in _THOUGHTS:
        return ""
    return json.dumps(part, sort_keys=True)


def _call(call_id: Any, name: Any, arguments: Any) -> str:
    return f"call {json.dumps([call_id, name, _arguments(arguments)])}"


def _arguments(arguments: Any) -> str:
    """Equal for equal JSON; text that is no JSON counts without the white space around it."""
    value = _value(arguments)
    if isinstance(value, Mapping) and value.keys() == {CUSTOM_INPUT} and isinstance(value[CUSTOM_INPUT], str):
        value = _value(value[CUSTOM_INPUT])  # of a custom tool, whose items hold the text alone
    return value.strip() if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _value(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
