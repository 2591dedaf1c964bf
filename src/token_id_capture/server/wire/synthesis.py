"""Make a stream from a whole response, when the client wants one and the engine cannot give it.

The chunks are those that OpenAI's server sends: the role, then reasoning, text and tool calls, then
the finish reason, for each choice; at the end the usage, if the client asked for it, and ``[DONE]``.
The text is not cut up: it is all there already, and a client joins the parts. The answer "four" becomes::

    data: {"id":"c1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant",...

    data: {"id":"c1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"four"},...

    data: {"id":"c1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}

    data: [DONE]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson

from token_id_capture.server.engines.base import Endpoint
from token_id_capture.server.text.sse import DONE

EVENT_STREAM: Final = b"text/event-stream; charset=utf-8"
_ENDING: Final = ("finish_reason", "stop_reason", "matched_stop")


def event_stream(endpoint: Endpoint, response: Mapping[str, Any], *, with_usage: bool) -> bytes:
    """The response, as its client sees it, as server-sent events."""
    chunks = list(_chunks(endpoint, response))
    if with_usage:
        chunks.append({**_head(endpoint, response), "choices": [], "usage": response.get("usage")})
    return b"".join(b"data: " + data + b"\n\n" for data in (*map(orjson.dumps, chunks), DONE))


def _head(endpoint: Endpoint, response: Mapping[str, Any]) -> dict[str, Any]:
    members = ("id", "object", "created", "model", "system_fingerprint", "service_tier")
    head = {name: response[name] for name in members if response.get(name) is not None}
    return {**head, "object": "chat.completion.chunk" if endpoint is Endpoint.CHAT else "text_completion"}


def _chunks(endpoint: Endpoint, response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    head = _head(endpoint, response)
    # What belongs to the whole response and is not part of OpenAI's, such as the prompt's ids, comes once.
    extra = {name: value for name, value in response.items() if name not in head and name not in ("choices", "usage")}
    choices = response.get("choices")
    for position, choice in enumerate(choices if isinstance(choices, list) else ()):
        if not isinstance(choice, Mapping):
            continue
        index = choice.get("index", position)
        for part in _chat_parts(choice) if endpoint is Endpoint.CHAT else [dict(choice)]:
            yield {**head, **extra, "choices": [{"index": index, **part}]}
            extra = {}


def _chat_parts(choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One choice in pieces. What stands beside its message goes with the first piece that says something."""
    message = choice.get("message")
    said = {key: value for key, value in message.items() if value is not None} if isinstance(message, Mapping) else {}
    beside = {key: value for key, value in choice.items() if key not in ("index", "message", *_ENDING)}
    yield {"delta": {"role": said.pop("role", "assistant"), "content": ""}, "logprobs": None, "finish_reason": None}
    calls = said.pop("tool_calls", None)
    content = said.pop("content", None)
    deltas: list[dict[str, Any]] = [{key: value} for key, value in said.items() if value != []]
    if content or not (deltas or calls):
        deltas.append({"content": content or ""})
    if isinstance(calls, list):
        deltas += [
            {"tool_calls": [{**call, "index": number}]}
            for number, call in enumerate(calls)
            if isinstance(call, Mapping)
        ]
    for delta in deltas:
        yield {"delta": delta, "finish_reason": None, **beside}
        beside = {}
    yield {"delta": {}, **{name: choice[name] for name in _ENDING if name in choice}}
