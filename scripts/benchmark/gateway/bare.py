"""The least that a proxy does, with the gateway's libraries: no capture, no limits, no errors of its own."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

UPSTREAM = "BENCH_UPSTREAM"
_HOP_BY_HOP = {"connection", "content-length", "host", "transfer-encoding"}


def app() -> ASGIApp:
    """The proxy in front of the engine that the environment names, as uvicorn makes it in each worker."""
    return bare_proxy(os.environ[UPSTREAM])


def bare_proxy(upstream: str) -> ASGIApp:
    """A proxy of requests and responses, whole or streamed."""
    sessions: list[aiohttp.ClientSession] = []

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False) as session:
            sessions.append(session)
            yield

    async def relay(request: Request) -> StreamingResponse:
        response = await sessions[0].request(
            request.method,
            upstream + request.url.path,
            data=await request.body(),
            headers=[(name, value) for name, value in request.headers.items() if name not in _HOP_BY_HOP],
        )
        headers = {name: value for name, value in response.headers.items() if name.lower() not in _HOP_BY_HOP}
        return StreamingResponse(response.content.iter_any(), response.status, headers)

    return Starlette(routes=[Route("/{path:path}", relay, methods=["GET", "POST"])], lifespan=lifespan)
