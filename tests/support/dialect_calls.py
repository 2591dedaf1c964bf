"""A call in each dialect, and an engine that answers all of them by one recording of vLLM."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from support.replay import Gateway, Recording, stream

MESSAGES, RESPONSES = "/v1/messages?beta=true", "/v1/responses"
GEMINI, GEMINI_STREAM = "/v1beta/models/g:generateContent", "/v1beta/models/g:streamGenerateContent?alt=sse"
MODEL = "their-model"


def messages(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": "hi"}], **more}


def responses(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hi", **more}


def contents(**more: Any) -> dict[str, Any]:
    return {"contents": [{"role": "user", "parts": [{"text": "hi"}]}], **more}


def calls(streamed: bool) -> list[tuple[str, dict[str, Any]]]:
    """A request of each dialect."""
    return [
        (MESSAGES, messages(stream=streamed)),
        (RESPONSES, responses(stream=streamed)),
        (GEMINI_STREAM if streamed else GEMINI, contents()),
    ]


def answer_with(gateway: Gateway, name: str) -> None:
    recording = Recording.named(name)

    async def answer(request: web.Request) -> web.StreamResponse:
        if recording.content_type.startswith("text/event-stream"):
            response: web.StreamResponse = await stream(request, [recording.payload])
            return response
        return web.Response(body=recording.payload, status=recording.status, content_type=recording.content_type)

    gateway.engine.handler = answer
