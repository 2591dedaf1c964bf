"""What must be reached, as ratios within one run: on two cores, with nothing else running."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Cells = Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]


@dataclass(frozen=True)
class Limit:
    """A bound on ours / JSON lines of one figure, by workload; None where the ratio is only shown."""

    title: str
    level: str
    figure: str
    at_least: bool
    bounds: Mapping[str, float | None]


@dataclass(frozen=True)
class Outcome:
    """A number, its bound and whether it holds (None: it has no bound)."""

    section: str
    title: str
    subject: str
    value: float
    at_least: bool
    bound: float | None

    @property
    def holds(self) -> bool | None:
        """Whether the bound holds."""
        if self.bound is None:
            return None
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        if self.bound is None:
            return f"{self.value:.2f}"
        return f"{self.value:.2f} {sign} {self.bound:g} {'ok' if self.holds else 'MISSED'}"

    def json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {**vars(self), "holds": self.holds}


def _bounds(chat: float | None, agent: float, long: float, crowd: float | None = None) -> dict[str, float | None]:
    return {"chat": chat, "agent": agent, "long": long, "crowd": crowd}


DELAYED = "store, fsync + 5 ms"

LIMITS = (
    Limit("calls/s", "store", "calls_per_second", True, _bounds(1.2, 1.0, 1.0)),
    Limit("CPU per call", "store", "cpu_us_per_call", False, _bounds(0.8, 1.0, 1.0)),
    Limit("bytes on disk", "store", "disk_kb_per_call", False, _bounds(0.7, 0.08, 0.04)),
    Limit(
        "freeze + build + trajectory / parsing the lines",
        "store",
        "read_ms_per_rollout",
        False,
        _bounds(None, 0.2, 0.1),
    ),
    Limit("calls/s", "response", "calls_per_second", True, _bounds(1.2, 2.0, 2.5)),
    Limit("CPU per call", "response", "cpu_us_per_call", False, _bounds(0.8, 0.5, 0.4)),
    Limit("calls/s", DELAYED, "calls_per_second", True, _bounds(5.0, 1.5, 0.8, 6.0)),
)

PUT_P99_OVER_P50 = 5.0


def judge_levels(cells: Cells) -> Iterator[Outcome]:
    """Ours against JSON lines at every level and workload that was measured."""
    for limit in LIMITS:
        for workload, bound in limit.bounds.items():
            stores = cells.get(limit.level, {}).get(workload)
            if stores is not None:
                ratio = stores["ours"][limit.figure] / stores["jsonl"][limit.figure]
                title = f"{limit.level}: {limit.title}, ours / jsonl"
                yield Outcome("levels", title, workload, ratio, limit.at_least, bound)
    for workload, stores in cells.get("store", {}).items():
        ours = stores["ours"]
        ratio = ours["put_p99_ms"] / ours["put_p50_ms"]
        yield Outcome("levels", "store: p99 / p50 of put", workload, ratio, False, PUT_P99_OVER_P50)
