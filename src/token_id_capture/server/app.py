"""The gateway as one ASGI application. The caller passes a sink and opens the store."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from token_id_capture.errors import ConfigurationError, ReplacedDatabaseError
from token_id_capture.protocols import TokenSink, offers
from token_id_capture.server.continuity.continuer import continuer_for
from token_id_capture.server.defaults import ADMIN, ENGINE, HAND_OFF
from token_id_capture.server.engines import make_engine
from token_id_capture.server.engines.base import Engine, keeps_connections
from token_id_capture.server.gateway import Gateway
from token_id_capture.server.http.admin import PROBE_PATHS, Operations
from token_id_capture.server.http.auth import ApiKeyMiddleware, KeyedApp, KeyedPathsMiddleware, NoBrowserMiddleware
from token_id_capture.server.http.limits import AccessLogged, BodyBudget, CallsInFlight
from token_id_capture.server.http.metered import MeteredSink
from token_id_capture.server.http.metrics import GatewayMetrics
from token_id_capture.server.http.monitor import Monitor, Watcher
from token_id_capture.server.http.readiness import Readiness
from token_id_capture.server.http.upstream import Upstream
from token_id_capture.server.http.weights import WeightVersions
from token_id_capture.server.middleware import ROLLOUT_PREFIX, TokenCaptureMiddleware
from token_id_capture.server.settings import GatewaySettings
from token_id_capture.server.translation.answers import answer_memory
from token_id_capture.server.translation.inline_system import InlineSystemProbe
from token_id_capture.server.translation.layer import DialectTranslation
from token_id_capture.server.upstreams.pool import RemembersUpstreams, Upstreams
from token_id_capture.server.upstreams.routes import UpstreamRoutes
from token_id_capture.server.upstreams.shared import SharedList, Watch

_logger = logging.getLogger(__name__)


def create_app(
    upstream: str | Sequence[str],
    sink: TokenSink | None,
    *,
    engine: str | Engine = ENGINE,
    settings: GatewaySettings | None = None,
    api_key: str | None = None,
    upstream_api_key: str | None = None,
    hand_off: KeyedApp | None = None,
    operator_key: str | None = None,
    shared_upstreams: Path | None = None,
) -> ASGIApp:
    """A gateway in front of the engine at ``upstream``, or of several, that records in ``sink``.

    ``engine`` is a name for ``engines.make_engine`` or an object that keeps its protocol. With
    ``api_key`` callers must send it; ``upstream_api_key`` is sent to the engine in place of theirs.
    ``hand_off`` is served at ``/hand-off`` to those who send its key, which must be another one. So must
    ``operator_key``: with it alone ``/admin`` is open, where upstreams are added and removed; processes of one server
    share the file ``shared_upstreams`` for that.
    At startup the sink is opened if it has an ``open``; at shutdown it is closed, after the calls in flight.

    Raises:
        ConfigurationError: the upstream is not a URL, the engine is unknown, continuity is wanted of an engine or
            a sink that cannot do it, or the agents' key would open the hand-off.
    """
    settings = settings or GatewaySettings()
    adapter = make_engine(engine) if isinstance(engine, str) else engine
    connections = _upstreams(upstream, settings, adapter, sink, upstream_api_key)
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
    probe, answers, refused = InlineSystemProbe(connections), answer_memory(sink), metrics.count_refusal
    translated = DialectTranslation(gateway, settings, probe, budget=budget, answers=answers, count_refusal=refused)
    counted = CallsInFlight(translated, metrics, limit=settings.max_concurrent_calls)
    observed = _observed(sink, metrics, traces=settings.traces)
    captured = TokenCaptureMiddleware(counted, sink=observed)
    shared = SharedList(shared_upstreams)
    admin = UpstreamRoutes(connections, shared, named, may_change=operator_key is not None)
    operations = Operations(Readiness(sink, connections.reach), metrics, sink, weights, connections.up)
    app: ASGIApp = _CallsFirst(
        [*operations.routes(), admin.route()],
        # Not a Mount, which would take the first slash off the path that is passed on.
        default=captured,
        redirect_slashes=False,
        lifespan=_lifespan(connections, sink, observed, [Monitor(metrics, sink), Watch(connections, shared)]),
    )
    return _guarded(app, settings, metrics, _Keys(api_key, operator_key, hand_off))


def _observed(sink: TokenSink | None, metrics: GatewayMetrics, *, traces: bool) -> TokenSink | None:
    """The sink, counted and traced as the settings say."""
    if sink is None or not traces:
        return None if sink is None else MeteredSink(sink, metrics)
    from token_id_capture.server.tracing import traced

    return traced(sink, metrics)


def _upstreams(
    addresses: str | Sequence[str], settings: GatewaySettings, adapter: Engine, sink: object, api_key: str | None
) -> Upstreams:
    def make(address: str) -> Upstream:
        return Upstream(
            address,
            connect_timeout=settings.connect_timeout,
            read_timeout=settings.read_timeout,
            api_key=api_key,
            keep_alive=keeps_connections(adapter),
        )

    memory = sink if offers(sink, RemembersUpstreams) else None
    return Upstreams([addresses] if isinstance(addresses, str) else addresses, make, memory)


@dataclass(frozen=True)
class _Keys:
    """Who may ask what: agents the gateway, the operator what is below ``/admin``, trainers the hand-off."""

    agents: str | None
    operator: str | None
    hand_off: KeyedApp | None

    def __post_init__(self) -> None:
        for key, what in ((self.operator, "operator"), (self.hand_off and self.hand_off.key, "hand-off")):
            if key is not None and key == self.agents:
                raise ConfigurationError(f"the key of the {what} is that of the agents: make another one")


def _guarded(app: ASGIApp, settings: GatewaySettings, metrics: GatewayMetrics, keys: _Keys) -> ASGIApp:
    """The gateway behind its key, and what agents must not reach behind others."""
    api_key, operated = keys.agents, app
    if api_key is not None:
        app = ApiKeyMiddleware(app, api_key, metrics, open_paths=PROBE_PATHS)
    else:
        app = NoBrowserMiddleware(app, settings.allowed_hosts, open_paths=PROBE_PATHS)
    keyed: dict[str, ASGIApp | None] = {HAND_OFF: None}
    if keys.hand_off is not None:
        logged = AccessLogged(keys.hand_off.app, metrics)
        keyed[HAND_OFF] = ApiKeyMiddleware(logged, keys.hand_off.key, metrics)
    if keys.operator is not None:
        keyed[ADMIN] = ApiKeyMiddleware(operated, keys.operator, metrics)
    return KeyedPathsMiddleware(app, keyed)


class _CallsFirst(Router):
    """Spares calls of rollouts the look at each route of the gateway's own."""

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(f"{ROLLOUT_PREFIX}/"):
            await self.default(scope, receive, send)
        else:
            await super().app(scope, receive, send)


class _Opens(Protocol):
    """A sink that wants to be opened before the first call, so that a bad file stops the start."""

    async def open(self) -> None: ...


def _lifespan(
    upstreams: Upstreams, sink: TokenSink | None, observed: TokenSink | None, watchers: Sequence[Watcher]
) -> Callable[[Any], AbstractAsyncContextManager[None]]:
    """What is open while the application serves."""

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        if offers(sink, _Opens):
            try:
                await sink.open()
            except ReplacedDatabaseError as error:
                # The file is gone under a server that runs. Calls get 503 and /readyz says why; an end here
                # would end the other workers with it, and their calls in flight.
                _logger.error("%s", error)
        for watcher in watchers:
            watcher.start()
        try:
            yield
        finally:
            for watcher in watchers:
                await watcher.stop()
            try:
                await upstreams.close()
            finally:
                if observed is not None:
                    await observed.close()

    return lifespan
