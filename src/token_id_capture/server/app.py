"""The gateway as one ASGI application. It is handed a sink; whoever starts it opens the store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, runtime_checkable

from starlette.types import ASGIApp, Receive, Scope, Send

from token_id_capture.protocols import TokenSink
from token_id_capture.server.engines import make_engine
from token_id_capture.server.engines.base import Engine
from token_id_capture.server.gateway import Gateway
from token_id_capture.server.middleware import TokenCaptureMiddleware
from token_id_capture.server.upstream import Upstream


def create_app(
    upstream: str,
    sink: TokenSink | None,
    *,
    engine: str | Engine = "auto",
    body_limit: int = 64 * 2**20,
    drain_seconds: float = 600.0,
    connect_timeout: float = 10.0,
    read_timeout: float = 3600.0,
    log_probs_mode: str | None = None,
) -> ASGIApp:
    """A gateway in front of the engine at ``upstream`` that records in ``sink``.

    ``engine`` is a name of ``engines.ENGINES`` or an object that keeps its protocol. Times are in
    seconds; see ``Gateway`` and ``Upstream`` for the limits. At startup the sink is opened if it has
    an ``open``; at shutdown it is closed, after the calls in flight.

    Raises:
        ConfigurationError: the upstream is no URL, or the engine is unknown.
    """
    connections = Upstream(upstream, connect_timeout=connect_timeout, read_timeout=read_timeout)
    gateway = Gateway(
        connections,
        make_engine(engine) if isinstance(engine, str) else engine,
        body_limit=body_limit,
        drain_seconds=drain_seconds,
        log_probs_mode=log_probs_mode,
    )
    return _WithLifespan(TokenCaptureMiddleware(gateway, sink=sink), connections, sink)


@runtime_checkable
class _Opens(Protocol):
    """A sink that wants to be opened before the first call, so that a bad file stops the start."""

    async def open(self) -> None: ...


class _WithLifespan:
    """Answers the server's lifespan messages; the rest goes to ``app``."""

    def __init__(self, app: ASGIApp, upstream: Upstream, sink: TokenSink | None) -> None:
        self._app = app
        self._upstream = upstream
        self._sink = sink

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        await receive()
        if not await _told(send, "startup", self._open):
            return
        await receive()
        await _told(send, "shutdown", self._close)

    async def _open(self) -> None:
        if isinstance(self._sink, _Opens):
            await self._sink.open()

    async def _close(self) -> None:
        try:
            await self._upstream.close()
        finally:
            if self._sink is not None:
                await self._sink.close()


async def _told(send: Send, phase: str, work: Callable[[], Awaitable[None]]) -> bool:
    """Do the work of a phase and tell the server how it went."""
    try:
        await work()
    except Exception as error:
        await send({"type": f"lifespan.{phase}.failed", "message": str(error)})
        return False
    await send({"type": f"lifespan.{phase}.complete"})
    return True
