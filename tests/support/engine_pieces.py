"""An engine that sends a stream in given pieces, and one captured call of it, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson

from support.memory_sink import PlainSink
from token_id_capture.capture.context import CaptureContext
from token_id_capture.capture.recorder import CallRecorder
from token_id_capture.server.call import CapturedCall
from token_id_capture.server.engines.base import Endpoint
from token_id_capture.server.engines.vllm import VllmEngine
from token_id_capture.server.http.client import Client
from token_id_capture.server.settings import GatewaySettings
from token_id_capture.server.wire.prompt_cache import KnownTexts
from token_id_capture.server.wire.request import CallBody


class Upstream:
    """An engine that sends these pieces."""

    status = 200
    is_event_stream = True

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self.headers = [(b"content-type", b"text/event-stream")]

    @asynccontextmanager
    async def open(self, scope: Any, body: bytes, *, plain: bool) -> AsyncIterator[Upstream]:
        yield self

    async def next_chunk(self) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""


async def captured(engine: VllmEngine, asked: dict[str, Any], pieces: list[bytes]) -> Any:
    """What the client sees of a stream, whether it ends whole, what is stored, and what is flagged."""
    seen: list[Any] = []

    async def send(message: Any) -> None:
        seen.append(message)

    async def listen() -> Any:
        await asyncio.get_running_loop().create_future()

    body = CallBody.parse(Endpoint.CHAT, orjson.dumps({"messages": [], "stream": True, **asked}))
    assert body is not None
    sink = PlainSink()
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    await CapturedCall(
        Client(scope, listen, send),
        body,
        b"",
        CallRecorder(CaptureContext("r", "c", sink)),
        engine=engine,
        upstream=Upstream(list(pieces)),  # type: ignore[arg-type]
        settings=GatewaySettings(),
        known=KnownTexts(),
    ).run()
    shown = b"".join(message.get("body", b"") for message in seen)
    entries = [entry.model_dump(exclude={"created_at"}) for entry in sink.entries]
    return shown, seen[-1].get("more_body"), entries, sink.marks
