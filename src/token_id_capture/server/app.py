"""The gateway as one ASGI application. It is handed a sink; whoever starts it opens the store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, runtime_checkable

from starlette.types import ASGIApp, Receive, Scope, Send

from token_id_capture.protocols import TokenSink
from token_id_capture.server.call import CaptureOptions
from token_id_capture.server.engines import make_engine
from token_id_capture.server.engines.base import Engine, keeps_connections
from token_id_capture.server.gateway import Gateway
from token_id_capture.server.http.admin import PROBE_PATHS, Operations
from token_id_capture.server.http.auth import ApiKeyMiddleware
from token_id_capture.server.http.limits import CallsInFlight
from token_id_capture.server.http.metered import MeteredSink
from token_id_capture.server.http.metrics import GatewayMetrics
from token_id_capture.server.http.monitor import Monitor
from token_id_capture.server.http.readiness import Readiness
from token_id_capture.server.http.upstream import Upstream
from token_id_capture.server.middleware import TokenCaptureMiddleware
from token_id_capture.server.wire.entries import SESSION_HEADERS
from token_id_capture.server.wire.request import Streaming


def create_app(
    upstream: str,
    sink: TokenSink | None,
    *,
    engine: str | Engine = "auto",
    body_limit: int = 64 * 2**20,
    client_timeout: float = 300.0,
    drain_seconds: float = 600.0,
    connect_timeout: float = 10.0,
    read_timeout: float = 3600.0,
    log_probs_mode: str | None = None,
    streaming: Streaming = "auto",
    tokenize_prompts: bool = False,
    session_headers: tuple[str, ...] = SESSION_HEADERS,
    api_key: str | None = None,
    upstream_api_key: str | None = None,
    max_concurrent_calls: int = 0,
) -> ASGIApp:
    """A gateway in front of the engine at ``upstream`` that records in ``sink``.

    ``engine`` is a name for ``engines.make_engine`` or an object that keeps its protocol. Times are in
    seconds; see ``Gateway``, ``CaptureOptions`` and ``Upstream``. With ``api_key`` callers must send it;
    ``upstream_api_key`` is sent to the engine in place of theirs. More than ``max_concurrent_calls``
    at once are answered with 503; 0 is no limit. At startup the sink is opened if it has an
    ``open``; at shutdown it is closed, after the calls in flight.

    Raises:
        ConfigurationError: the upstream is no URL, or the engine is unknown.
    """
    adapter = make_engine(engine) if isinstance(engine, str) else engine
    connections = Upstream(
        upstream,
        connect_timeout=connect_timeout,
        read_timeout=read_timeout,
        api_key=upstream_api_key,
        keep_alive=keeps_connections(adapter),
    )
    metrics = GatewayMetrics()
    gateway = Gateway(
        connections,
        adapter,
        body_limit=body_limit,
        client_timeout=client_timeout,
        options=CaptureOptions(drain_seconds, log_probs_mode, streaming, tokenize_prompts, session_headers),
        count_refusal=metrics.count_refusal,
    )
    counted = CallsInFlight(gateway, metrics, limit=max_concurrent_calls)
    captured = TokenCaptureMiddleware(counted, sink=None if sink is None else MeteredSink(sink, metrics))
    app: ASGIApp = Operations(captured, Readiness(sink, connections.reach), metrics, sink)
    if api_key is not None:
        app = ApiKeyMiddleware(app, api_key, metrics, open_paths=PROBE_PATHS)
    return _WithLifespan(app, connections, sink, Monitor(metrics, sink))


@runtime_checkable
class _Opens(Protocol):
    """A sink that wants to be opened before the first call, so that a bad file stops the start."""

    async def open(self) -> None: ...


class _WithLifespan:
    """Answers the server's lifespan messages; the rest goes to ``app``."""

    def __init__(self, app: ASGIApp, upstream: Upstream, sink: TokenSink | None, monitor: Monitor) -> None:
        self._app = app
        self._upstream = upstream
        self._sink = sink
        self._monitor = monitor

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
        self._monitor.start()

    async def _close(self) -> None:
        await self._monitor.stop()
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
