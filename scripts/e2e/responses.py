"""Responses of an OpenAI-compatible server, read in the plainest way: whole bodies, nothing incremental."""

from __future__ import annotations

from typing import Any

import orjson

Json = dict[str, Any]


def chunks_of(body: bytes) -> list[Json]:
    """The JSON objects of a stream of server-sent events; an event that was cut off is left out."""
    events = body.decode("utf-8", errors="replace").replace("\r\n", "\n").split("\n\n")[:-1]
    found: list[Json] = []
    for event in events:
        data = "\n".join(line[5:].removeprefix(" ") for line in event.split("\n") if line.startswith("data:"))
        if data and data != "[DONE]":
            found.append(orjson.loads(data))
    return found


def is_done(body: bytes) -> bool:
    """Whether a stream came to its ``[DONE]``."""
    return body.rstrip().endswith(b"data: [DONE]")


def parts_of(body: bytes, streamed: bool) -> list[Json]:
    """The chunks of a stream, or the one object of a whole response."""
    return chunks_of(body) if streamed else [orjson.loads(body)]


def messages_of(parts: list[Json]) -> dict[int, Json]:
    """The assistant's message of each choice, to be echoed in the next request; of a completion, its text."""
    found: dict[int, Json] = {}
    for part in parts:
        for choice in part.get("choices") or ():
            if "message" in choice:
                found[choice["index"]] = choice["message"]
                continue
            message = found.setdefault(choice["index"], {"role": "assistant", "content": ""})
            delta = choice.get("delta") or {}
            message["content"] += delta.get("content") or choice.get("text") or ""
            for call in delta.get("tool_calls") or ():
                _add_call(message.setdefault("tool_calls", {}), call)
    for message in found.values():
        if isinstance(calls := message.get("tool_calls"), dict):
            message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return found


def _add_call(calls: dict[int, Json], delta: Json) -> None:
    call = calls.setdefault(delta["index"], {"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call["id"] += delta.get("id") or ""
    for part in ("name", "arguments"):
        call["function"][part] += (delta.get("function") or {}).get(part) or ""


def finish_reasons(parts: list[Json]) -> dict[int, str]:
    """Why each choice ended; choices that did not end are missing."""
    return {
        choice["index"]: choice["finish_reason"]
        for part in parts
        for choice in part.get("choices") or ()
        if choice.get("finish_reason")
    }
