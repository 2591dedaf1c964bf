"""What an operator asks the gateway itself, beside what agents ask the engine through it.

These paths exist at the root alone. Below a rollout's prefix the same words are the engine's, and
an engine's own ``/metrics`` is hidden behind the gateway's: scrape the engine directly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import orjson
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from token_id_capture.protocols import TokenSink
from token_id_capture.server.http.errors import send_error
from token_id_capture.server.http.metrics import CONTENT_TYPE, GatewayMetrics
from token_id_capture.server.http.readiness import Readiness, WatchedSink

HEALTH: Final = "/healthz"
READINESS: Final = "/readyz"
METRICS: Final = "/metrics"

PROBE_PATHS: Final = (HEALTH, READINESS)
"""What load balancers and schedulers ask; they have no key, and learn nothing that needs one."""


class Operations:
    """Answers ``GET`` on the operator's paths; all else goes to ``app``."""

    def __init__(self, app: ASGIApp, readiness: Readiness, metrics: GatewayMetrics, sink: TokenSink | None) -> None:
        self._app = app
        self._readiness = readiness
        self._metrics = metrics
        self._sink = sink
        self._answers = {HEALTH: self._health, READINESS: self._ready, METRICS: self._render}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._answers.get(scope["path"]) if scope["type"] == "http" else None
        if answer is None:
            await self._app(scope, receive, send)
        elif scope["method"] not in ("GET", "HEAD"):
            await send_error(scope, receive, send, 405, "Use GET here.", "method_not_allowed", allow="GET, HEAD")
        else:
            response = await answer()
            await response(scope, receive, send)

    async def _health(self) -> Response:
        return _status(200, {"status": "ok"})

    async def _ready(self) -> Response:
        problems = await self._readiness.problems()
        if problems:
            return _status(503, {"status": "not ready", "problems": problems})
        return _status(200, {"status": "ready"})

    async def _render(self) -> Response:
        wal_bytes = self._sink.wal_bytes() if isinstance(self._sink, WatchedSink) else None
        text = await asyncio.to_thread(self._metrics.render, wal_bytes)
        return Response(text, media_type=None, headers={"content-type": CONTENT_TYPE, "cache-control": "no-store"})


def _status(status: int, body: Mapping[str, object]) -> Response:
    return Response(orjson.dumps(body), status, {"cache-control": "no-store"}, media_type="application/json")
