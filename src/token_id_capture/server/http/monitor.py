"""What runs beside the calls: a look, twice a second, at what nobody reports, the event loop and the store's queue."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Final

from token_id_capture.protocols import TokenSink, offers
from token_id_capture.server.http.metrics import GatewayMetrics
from token_id_capture.server.http.readiness import WatchedSink

INTERVAL_SECONDS: Final = 0.5


class Watcher(ABC):
    """A task that runs from ``start`` to ``stop``."""

    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start, in the running event loop."""
        self._task = asyncio.create_task(self._run(), name=f"tokcap-{type(self).__name__.lower()}")

    async def stop(self) -> None:
        """Stop. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    @abstractmethod
    async def _run(self) -> None:
        """Run until cancelled."""


class Monitor(Watcher):
    """Keeps ``metrics`` current."""

    def __init__(self, metrics: GatewayMetrics, sink: TokenSink | None) -> None:
        self._metrics = metrics
        self._sink = sink

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            asked = loop.time()
            await asyncio.sleep(INTERVAL_SECONDS)
            self._metrics.loop_lag.observe(max(0.0, loop.time() - asked - INTERVAL_SECONDS))
            self._look()

    def _look(self) -> None:
        if offers(self._sink, WatchedSink):
            jobs, size = self._sink.waiting()
            self._metrics.queue_jobs.set(jobs)
            self._metrics.queue_bytes.set(size)
