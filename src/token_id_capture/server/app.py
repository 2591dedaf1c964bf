"""The gateway as one ASGI application. It is handed a sink; whoever starts it opens the store."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, runtime_checkable

from starlette.routing import Router
from starlette.types import ASGIApp

from token_id_capture.errors import ConfigurationError, ReplacedDatabaseError
from token_id_capture.protocols import TokenSink
from token_id_capture.server.continuity.continuer import continuer_for
from token_id_capture.server.defaults import ENGINE
from token_id_capture.server.engines import make_engine
from token_id_capture.server.engines.base import Engine, keeps_connections
from token_id_capture.server.gateway import Gateway
from token_id_capture.server.http.admin import PROBE_PATHS, Operations
from token_id_capture.server.http.auth import ApiKeyMiddleware, HandOffMiddleware, KeyedApp, NoBrowserMiddleware
from token_id_capture.server.http.limits import BodyBudget, CallsInFlight
from token_id_capture.server.http.metered import MeteredSink
from token_id_capture.server.http.metrics import GatewayMetrics
from token_id_capture.server.http.monitor import Monitor
from token_id_capture.server.http.readiness import Readiness
from token_id_capture.server.http.upstream import Upstream
from token_id_capture.server.http.weights import WeightVersions
from token_id_capture.server.middleware import TokenCaptureMiddleware
from token_id_capture.server.settings import GatewaySettings
from token_id_capture.server.translation.answers import answer_memory
from token_id_capture.server.translation.inline_system import InlineSystemProbe
from token_id_capture.server.translation.layer import DialectTranslation

_logger = logging.getLogger(__name__)


def create_app(
    upstream: str,
    sink: TokenSink | None,
    *,
    engine: str | Engine = ENGINE,
    settings: GatewaySettings | None = None,
    api_key: str | None = None,
    upstream_api_key: str | None = None,
    hand_off: KeyedApp | None = None,
) -> ASGIApp:
    """A gateway in front of the engine at ``upstream`` that records in ``sink``.

    ``engine`` is a name for ``engines.make_engine`` or an object that keeps its protocol. With
    ``api_key`` callers must send it; ``upstream_api_key`` is sent to the engine in place of theirs.
    ``hand_off`` is served at ``/hand-off`` to those who send its key, which must be another one.
    At startup the sink is opened if it has an ``open``; at shutdown it is closed, after the calls in flight.

    Raises:
        ConfigurationError: the upstream is no URL, the engine is unknown, continuity is wanted of an engine or
            a sink that cannot do it, or the agents' key would open the hand-off.
    """
    settings = settings or GatewaySettings()
    adapter = make_engine(engine) if isinstance(engine, str) else engine
    connections = Upstream(
        upstream,
        connect_timeout=settings.connect_timeout,
        read_timeout=settings.read_timeout,
        api_key=upstream_api_key,
        keep_alive=keeps_connections(adapter),
    )
    metrics = GatewayMetrics()
    named = engine if isinstance(engine, str) else type(engine).__name__
    continuer = continuer_for(adapter, settings.continuity, sink, connections, metrics, name=named)
    weights = WeightVersions(sink)
    budget = BodyBudget(settings.body_bytes_in_flight)
    gateway = Gateway(
        connections,
        adapter,
        settings,
        budget=budget,
        continuer=continuer,
        count_refusal=metrics.count_refusal,
        count_untagged=None if sink is None else metrics.untagged.inc,
        weights=weights,
    )
    probe, answers = InlineSystemProbe(connections), answer_memory(sink)
    translated = DialectTranslation(
        gateway, settings, probe, budget=budget, answers=answers, count_refusal=metrics.count_refusal
    )
    counted = CallsInFlight(translated, metrics, limit=settings.max_concurrent_calls)
    captured = TokenCaptureMiddleware(counted, sink=None if sink is None else MeteredSink(sink, metrics))
    app: ASGIApp = Router(
        Operations(Readiness(sink, connections.reach), metrics, sink, weights).routes(),
        # Not a Mount, which would take the first slash off the path that is passed on.
        default=captured,
        redirect_slashes=False,
        lifespan=_lifespan(connections, sink, Monitor(metrics, sink)),
    )
    return _guarded(app, settings, metrics, api_key, hand_off)


def _guarded(
    app: ASGIApp, settings: GatewaySettings, metrics: GatewayMetrics, api_key: str | None, hand_off: KeyedApp | None
) -> ASGIApp:
    """The gateway behind its key, and the hand-off behind another one."""
    if hand_off is not None and hand_off.key == api_key:
        raise ConfigurationError(
            "the key of the hand-off is that of the agents, who must not read token ids: make another one"
        )
    if api_key is not None:
        app = ApiKeyMiddleware(app, api_key, metrics, open_paths=PROBE_PATHS)
    else:
        app = NoBrowserMiddleware(app, settings.allowed_hosts, open_paths=PROBE_PATHS)
    return HandOffMiddleware(app, hand_off, metrics)


@runtime_checkable
class _Opens(Protocol):
    """A sink that wants to be opened before the first call, so that a bad file stops the start."""

    async def open(self) -> None: ...


def _lifespan(
    upstream: Upstream, sink: TokenSink | None, monitor: Monitor
) -> Callable[[Any], AbstractAsyncContextManager[None]]:
    """What is open while the application serves."""

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        if isinstance(sink, _Opens):
            try:
                await sink.open()
            except ReplacedDatabaseError as error:
                # The file is gone under a server that runs. Calls get 503 and /readyz says why; an end here
                # would end the other workers with it, and their calls in flight.
                _logger.error("%s", error)
        monitor.start()
        try:
            yield
        finally:
            await monitor.stop()
            try:
                await upstream.close()
            finally:
                if sink is not None:
                    await sink.close()

    return lifespan
