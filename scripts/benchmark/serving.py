"""Child job: a server on a loopback port: the testing engine, a bare proxy in front of it, or the gateway."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from benchmark.child import wait_for_word
from benchmark.measure import Stopwatch
from token_id_capture.server.listener import listen

_HOP_BY_HOP = {"connection", "content-length", "host", "transfer-encoding"}


async def run(
    start: Callable[..., None],
    *,
    server: str,
    upstream: str = "",
    directory: str = "",
    seconds_per_token: float = 0.0,
) -> dict[str, Any]:
    """Serve until the parent speaks again; the processor seconds in between, and the calls that are stored."""
    apps: dict[str, Callable[[], ASGIApp]] = {
        "engine": lambda: testing_engine(seconds_per_token),
        "bare": lambda: bare_proxy(upstream),
        "gateway": lambda: gateway(upstream, Path(directory)),
    }
    async with serve(apps[server]()) as url:
        await asyncio.to_thread(start, url=url)
        watch = Stopwatch()
        await asyncio.to_thread(wait_for_word)
        cpu = watch.cpu()
    return {"cpu": cpu, "captured": await count_calls(Path(directory)) if server == "gateway" else 0}


@asynccontextmanager
async def serve(app: ASGIApp) -> AsyncIterator[str]:
    """One worker of uvicorn in this event loop."""
    with listen(socket.AF_INET, ("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        # The socket listens already: who connects before the server accepts only waits a moment.
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await serving


def testing_engine(seconds_per_token: float) -> ASGIApp:
    """The engine that comes with the package; it never ends a turn, so that all streams are equally long."""
    from token_id_capture.testing.engine import PolicyEngine
    from token_id_capture.testing.policy import Policy, SampledToken
    from token_id_capture.testing.template import END_OF_TURN

    class Talkative(Policy):
        def sample(self, prompt: Any, *, banned: Any = (), **options: Any) -> Iterator[SampledToken]:
            return super().sample(prompt, banned={*banned, END_OF_TURN}, **options)

    return PolicyEngine(Talkative(), seconds_per_token=seconds_per_token)


def gateway(upstream: str, directory: Path) -> ASGIApp:
    """The gateway with a store of its own."""
    from token_id_capture import TokenCaptureStore
    from token_id_capture.server.app import create_app

    return create_app(upstream, TokenCaptureStore(directory))


def bare_proxy(upstream: str) -> ASGIApp:
    """The least that a proxy of streams does, with the same two libraries."""
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


async def count_calls(directory: Path) -> int:
    """The calls of all rollouts in a store."""
    from token_id_capture import TokenCaptureStore

    async with TokenCaptureStore(directory) as store:
        return sum(rollout.calls for rollout in await store.list_rollouts(limit=100_000))
