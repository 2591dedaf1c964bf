"""What the engine made of an answer: texts, thoughts and calls of tools, from the items of a response. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from token_id_capture.report.model import Said
from token_id_capture.report.segments import Part


def said_in(items: Sequence[Mapping[str, Any]], *, texts: bool) -> tuple[Said, ...]:
    """The parts of an answer in their order; without ``texts`` only its calls of tools."""
    found = (said for item in items for said in _of_item(item))
    return tuple(said for said in found if texts or said.part is Part.TOOL_CALL)


def _of_item(item: Mapping[str, Any]) -> Iterator[Said]:
    kind = item.get("type")
    for name in ("reasoning_content", "reasoning"):
        if isinstance(item.get(name), str) and item[name]:
            yield Said(Part.REASONING, item[name])
            break
    if kind == "function_call":
        yield _tool_call(item)
    for text in _texts(item):
        yield Said(Part.REASONING if kind == "reasoning" else Part.ASSISTANT, text)
    calls = item.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            yield _tool_call(function)


def _tool_call(function: Mapping[str, Any]) -> Said:
    return Said(Part.TOOL_CALL, str(function.get("arguments") or ""), str(function.get("name") or ""))


def _texts(item: Mapping[str, Any]) -> Iterator[str]:
    for name in ("content", "summary", "text"):
        content = item.get(name)
        if isinstance(content, str) and content:
            yield content
        elif isinstance(content, list):
            parts = (part.get("text") for part in content if isinstance(part, Mapping))
            yield from (text for text in parts if isinstance(text, str) and text)
