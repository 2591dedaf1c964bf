"""Responses in vLLM's shape that no recording has: short, and wrong where a test wants it."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from aiohttp import web

from support.replay import stream

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**BODY, "stream": True}


def answering(payload: Any, status: int = 200, *, after: asyncio.Event | None = None) -> Any:
    """A handler that gives one JSON response, if told so only after an event."""

    async def handler(request: web.Request) -> web.Response:
        if after is not None:
            await after.wait()
        return web.Response(body=orjson.dumps(payload), status=status, content_type="application/json")

    return handler


def streaming(*chunks: bytes) -> Any:
    """A handler that streams these chunks and ends cleanly."""

    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, chunks)

    return handler


def pausing(first: bytes, go_on: asyncio.Event, rest: bytes) -> Any:
    """A handler that streams the rest only after an event."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(first)
        await go_on.wait()
        await response.write(rest)
        await response.write_eof()
        return response

    return handler


def chat(ids: Any, log_probs: Any, counted: int | None = None, **choice: Any) -> dict[str, Any]:
    entries = None if log_probs is None else {"content": [{"token": "x", "logprob": value} for value in log_probs]}
    message = {"role": "assistant", "content": "hi"}
    return {
        "id": "chat-1",
        "model": "tiny",
        "prompt_token_ids": [1, 2, 3],
        "choices": [
            {"index": 0, "message": message, "logprobs": entries, "finish_reason": "stop", "token_ids": ids, **choice}
        ],
        "usage": {"completion_tokens": len(ids or ()) if counted is None else counted},
    }


def events(*chunks: Any, done: bool = True) -> list[bytes]:
    frames = [b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks]
    return [*frames, b"data: [DONE]\n\n"] if done else frames


def delta(ids: list[int], finish: str | None = None, **more: Any) -> dict[str, Any]:
    entries = {"content": [{"token": "x", "logprob": -0.5} for _ in ids]}
    choice = {"index": 0, "delta": {"content": "x"}, "logprobs": entries, "finish_reason": finish, "token_ids": ids}
    return {"id": "chat-1", "model": "tiny", "choices": [choice], **more}


FIRST = delta([], prompt_token_ids=[1, 2, 3])


def usage(count: int) -> dict[str, Any]:
    return {"id": "chat-1", "choices": [], "usage": {"completion_tokens": count}}
