"""What an operator asks the gateway itself, beside what agents ask the engine through it.

These paths exist at the root alone. Below a rollout's prefix the same words are the engine's, and
an engine's own ``/metrics`` is hidden behind the gateway's: scrape the engine directly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from token_id_capture.protocols import TokenSink, offers
from token_id_capture.server.http.errors import send_error
from token_id_capture.server.http.metrics import CONTENT_TYPE, GatewayMetrics
from token_id_capture.server.http.readiness import Readiness, WatchedSink
from token_id_capture.server.http.weights import WEIGHT_VERSION, WeightVersions

HEALTH: Final = "/healthz"
READINESS: Final = "/readyz"
METRICS: Final = "/metrics"

PROBE_PATHS: Final = (HEALTH, READINESS)
"""What load balancers and schedulers ask; they have no key, and learn nothing that needs one."""


class Operations:
    """The operator's routes; each answers ``GET``, and the weight version ``POST`` too."""

    def __init__(
        self,
        readiness: Readiness,
        metrics: GatewayMetrics,
        sink: TokenSink | None,
        weights: WeightVersions,
        upstreams: Callable[[], Mapping[str, bool]],
    ) -> None:
        """``upstreams`` tells of the address of each engine whether calls are sent there."""
        self._readiness = readiness
        self._metrics = metrics
        self._sink = sink
        self._weights = weights
        self._upstreams = upstreams

    def routes(self) -> list[Route]:
        """For each path its answer, then a refusal of the other methods in the gateway's own form."""
        answers = {HEALTH: self._health, READINESS: self._ready, METRICS: self._render}
        return [
            *(Route(path, answer, methods=["GET"]) for path, answer in answers.items()),
            *(Route(path, _UseGet()) for path in answers),
            Route(WEIGHT_VERSION, self._weights.answer, methods=["GET", "POST"]),
        ]

    async def _health(self, request: Request) -> Response:
        return _status(200, {"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        problems = await self._readiness.problems()
        if problems:
            return _status(503, {"status": "not ready", "problems": list(problems), "why": problems})
        return _status(200, {"status": "ready"})

    async def _render(self, request: Request) -> Response:
        wal_bytes = self._sink.wal_bytes() if offers(self._sink, WatchedSink) else None
        text = await asyncio.to_thread(self._metrics.render, wal_bytes, self._upstreams())
        return Response(text, media_type=None, headers={"content-type": CONTENT_TYPE, "cache-control": "no-store"})


class _UseGet:
    """Refuses every other method. An application of its own, as a function would be a route for ``GET``."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_error(scope, receive, send, 405, "Use GET here.", "method_not_allowed", allow="GET, HEAD")


def _status(status: int, body: Mapping[str, object]) -> Response:
    return Response(orjson.dumps(body), status, {"cache-control": "no-store"}, media_type="application/json")
