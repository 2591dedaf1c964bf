"""What a model said, in a form in which two tellings of it can be compared. Pure.

A chat message and the items of the Responses API that say the same give the same. Thoughts do not count,
because harnesses drop them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

Said = tuple[str, ...]
"""Texts and tool calls in order, each with its kind in front."""

_TEXT_PARTS: Final = ("text", "output_text", "input_text", "refusal")


def said(items: Iterable[Any]) -> Said:
    """What the model authored of these items: text parts and tool calls."""
    return tuple(part for item in items if isinstance(item, Mapping) for part in _parts(item))


def is_model_authored(item: Any) -> bool:
    """Whether the model said it: an assistant's message or a tool call."""
    if not isinstance(item, Mapping):
        return False
    return item.get("role") == "assistant" or item.get("type") in ("function_call", "custom_tool_call")


def is_tool_result(item: Any) -> bool:
    """Whether it is what a tool answered."""
    if not isinstance(item, Mapping):
        return False
    return item.get("role") == "tool" or item.get("type") in ("function_call_output", "custom_tool_call_output")


def is_reasoning(item: Any) -> bool:
    """Whether it is a thought alone."""
    return isinstance(item, Mapping) and item.get("type") == "reasoning"


def _parts(item: Mapping[str, Any]) -> Iterator[str]:
    if not is_model_authored(item) and not (item.get("type") == "message" and "role" not in item):
        return
    if item.get("type") in ("function_call", "custom_tool_call"):
        yield _call(item.get("call_id") or item.get("id"), item.get("name"), item.get("arguments", item.get("input")))
        return
    content = item.get("content")
    for part in [content] if isinstance(content, str) else content if isinstance(content, list) else []:
        if text := part if isinstance(part, str) else _text_of(part):
            yield f"text {text}"
    for call in item.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            yield _call(call.get("id"), function.get("name"), function.get("arguments"))


def _text_of(part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS:
        text = part.get("text", part.get("refusal"))
        return text if isinstance(text, str) else ""
    return json.dumps(part, sort_keys=True)


def _call(call_id: Any, name: Any, arguments: Any) -> str:
    return f"call {json.dumps([call_id, name, _arguments(arguments)])}"


def _arguments(arguments: Any) -> str:
    """Equal for equal JSON; text that is no JSON counts without the white space around it."""
    if not isinstance(arguments, str):
        return json.dumps(arguments, sort_keys=True)
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments.strip()
