"""What the gateway counts, in Prometheus' text format.

Labels come from fixed lists: no rollout, call, path, model or client is one. With several workers
prometheus_client keeps the numbers in files of a directory that they share (the variable
``PROMETHEUS_MULTIPROC_DIR``, which must be set before this module is imported), and any worker
answers for all of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from token_id_capture import reasons

_DIRECTORY_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

OUTCOMES: Final = {
    "captured": "its tokens are durable",
    "refused": "the engine refused it, or was not there, and generated nothing",
    "marked": "its tokens are not stored, and its rollout is marked with the reason",
    "uncaptured": "it went to an endpoint that can generate and is not captured; its rollout is marked",
    "late": "its rollout was frozen or retired before its tokens came",
    "closed": "not sent to the engine, because its rollout was frozen or retired (410)",
    "unavailable": "not sent to the engine, because it could not be registered (503)",
    "overloaded": "not sent to the engine, because too many calls were in flight (503)",
}
"""What becomes of a call. One that is cut off by the end of its process is none of these: it is in
``tokcap_calls_begun_total`` alone, as its intent stays open."""

_PUT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_LAG_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)


class GatewayMetrics:
    """The numbers of one gateway; ``render`` gives those of the whole server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._directory = os.environ.get(_DIRECTORY_VARIABLE)
        self._calls = Counter(
            "tokcap_calls",
            "Calls of captured rollouts by what became of them; the reason is one of a mark.",
            ["outcome", "reason"],
            registry=self._registry,
        )
        self._continuity = Counter(
            "tokcap_continuity",
            "Captured calls with --continuity by how their prompt was made: the mode, or why it was the template's.",
            ["outcome"],
            registry=self._registry,
        )
        self.begun = self._counter("tokcap_calls_begun", "Calls that were registered before they were sent.")
        self.untagged = self._counter(
            "tokcap_calls_untagged",
            "Calls that could generate and were passed on uncaptured, because their path names no rollout.",
        )
        self.unauthorized = self._counter("tokcap_unauthorized", "Requests without the gateway's key (401).")
        self.zero_log_probs = self._counter(
            "tokcap_zero_log_probs", "Captured choices all of whose log probabilities are exactly 0."
        )
        self._refusals = Counter(
            "tokcap_requests_refused",
            "Requests that the gateway refused because of their body, by status code.",
            ["code"],
            registry=self._registry,
        )
        self.put_seconds = self._histogram(
            "tokcap_put_seconds", "Time until an entry was durable, or failed to be.", _PUT_BUCKETS
        )
        self.continuity_seconds = self._histogram(
            "tokcap_continuity_seconds", "Time until a prompt was decided on with --continuity.", _PUT_BUCKETS
        )
        self.loop_lag = self._histogram(
            "tokcap_event_loop_lag_seconds", "How late the event loop resumed a timer.", _LAG_BUCKETS
        )
        self.calls_in_flight = self._gauge("tokcap_calls_in_flight", "Calls that could generate and have not ended.")
        self.streams_in_flight = self._gauge("tokcap_streams_in_flight", "Event streams that have not ended.")
        self.queue_jobs = self._gauge("tokcap_store_queue_jobs", "Writes that wait for the store.")
        self.queue_bytes = self._gauge("tokcap_store_queue_bytes", "Bytes of the writes that wait for the store.")
        for outcome in OUTCOMES:
            if outcome != "marked":
                self._calls.labels(outcome, "")

    def count(self, outcome: str, reason: str = "") -> None:
        """Count a call under one of ``OUTCOMES``; a reason that is not one of ``reasons`` is unspecified."""
        known = reason in reasons.FLAG_REASONS or not reason
        self._calls.labels(outcome, reason if known else reasons.UNSPECIFIED).inc()

    def count_refusal(self, code: str) -> None:
        """Count a request that was refused for its body."""
        self._refusals.labels(code).inc()

    def count_continuity(self, outcome: str) -> None:
        """Count a captured call by how its prompt was made."""
        self._continuity.labels(outcome).inc()

    def render(self, wal_bytes: int | None, upstreams: Mapping[str, bool]) -> bytes:
        """All numbers as text. Reads files, so call it outside the event loop.

        ``wal_bytes`` belongs to the file, and ``upstreams`` says of each address whether calls are sent there. Neither
        belongs to one process, so the caller passes both each time.
        """
        registry = self._registry
        if self._directory is not None:
            registry = CollectorRegistry()
            MultiProcessCollector(registry, self._directory)  # type: ignore[no-untyped-call]
        text = generate_latest(registry)
        up = GaugeMetricFamily(
            "tokcap_upstream_up",
            "Whether calls are sent to the upstream (1), or it is left out until it is healthy (0).",
            labels=["upstream"],
        )
        for address, is_up in upstreams.items():
            up.add_metric([address], float(is_up))
        families = [up]
        if wal_bytes is not None:
            families.append(GaugeMetricFamily("tokcap_wal_bytes", "Size of the database's write-ahead log.", wal_bytes))
        asked = CollectorRegistry()
        asked.register(_Gauges(families))
        return text + generate_latest(asked)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self._registry, multiprocess_mode="livesum")

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self._registry)


class _Gauges(Collector):
    """Numbers that are known when they are asked for. A ``Gauge`` would also put them in the shared files."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def forget_process(pid: int, directory: str) -> None:
    """Take a process that ended out of the gauges; what it counted stays."""
    mark_process_dead(pid, directory)  # type: ignore[no-untyped-call]
