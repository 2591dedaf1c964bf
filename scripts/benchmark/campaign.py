"""Repeats: every store on the same calls, in turn, so that a slow minute hits all of them alike."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmark.fsync_delay import delayed_environment
from benchmark.inputs import write_inputs
from benchmark.measure import MEGABYTE, percentile
from benchmark.processes import Job, run_together
from benchmark.workloads import Workload

Figures = dict[str, float]


@dataclass(frozen=True)
class Level:
    """How much of the way from the engine's bytes is measured, on what disk, with which stores."""

    name: str
    kind: str
    forms: tuple[str, ...]
    stores: tuple[str, ...]
    fsync_delay: float = 0.0
    consumes: bool = False


STORE = Level("store", "store", ("arrays", "packed"), ("ours", "jsonl", "limit"), consumes=True)
RESPONSE = Level("response", "response", ("response",), ("ours", "jsonl"))


def delayed(seconds: float) -> Level:
    """The store level on a disk whose fsync takes so much longer."""
    name = f"store, fsync + {seconds * 1e3:g} ms"
    return Level(name, STORE.kind, STORE.forms, STORE.stores, fsync_delay=seconds)


@dataclass
class Bench:
    """What all measurements share: where files go, how often to repeat, what was found so far."""

    root: Path
    repeats: int
    shrink: int = 1
    cells: dict[str, dict[str, dict[str, Figures]]] = field(default_factory=dict)
    """level, workload, store: the medians."""

    def say(self, text: str) -> None:
        """Tell a person who waits what is being done."""
        print(text, file=sys.stderr, flush=True)

    def sized(self, workload: Workload) -> Workload:
        """The workload as it is, or smaller if only trying out."""
        return workload.shrunk(self.shrink)

    @contextmanager
    def directory(self, name: str = "run") -> Iterator[Path]:
        """A new directory, deleted afterwards."""
        path = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.root))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def interleaved(self, runs: Mapping[str, Callable[[], Figures]]) -> dict[str, Figures]:
        """Run each in turn, ``repeats`` times, another one first every time; the medians by name."""
        found: dict[str, list[Figures]] = {name: [] for name in runs}
        names = list(runs)
        for repeat in range(self.repeats):
            shift = repeat % len(names)
            for name in names[shift:] + names[:shift]:
                found[name].append(runs[name]())
        return {name: medians(repeats) for name, repeats in found.items()}

    def measure(self, workload: Workload, levels: Sequence[Level]) -> None:
        """All stores on one workload, at these levels."""
        sized = self.sized(workload)
        with self.directory("inputs") as inputs:
            write_inputs(sized, inputs, tuple({form for level in levels for form in level.forms}))
            for level in levels:
                self.say(f"{level.name}: {workload.name}, {sized.rollouts} rollouts x {sized.calls} calls")
                runs = {store: self._run(level, store, inputs) for store in level.stores}
                self.cells.setdefault(level.name, {})[workload.name] = self.interleaved(runs)

    def _run(self, level: Level, store: str, inputs: Path) -> Callable[[], Figures]:
        environment = delayed_environment(level.fsync_delay, self.root)

        def run() -> Figures:
            with self.directory() as directory:
                arguments: dict[str, Any] = {"store": store, "level": level.kind, "inputs": str(inputs)}
                arguments |= {"directory": str(directory), "consumes": level.consumes}
                return figures(run_together([Job("play", arguments, environment)]))

        return run


def figures(results: Sequence[Mapping[str, Any]]) -> Figures:
    """What the processes of one run found, together."""
    waits = [wait for result in results for wait in result["waits"]]
    seconds = max(result["ended_at"] for result in results) - min(result["started_at"] for result in results)
    rollouts = sum(result["rollouts"] for result in results)
    found = {
        "calls_per_second": len(waits) / seconds,
        # Closing is counted: what a store puts off until then is part of its price.
        "cpu_us_per_call": 1e6 * sum(result["cpu"] + result["close_cpu"] for result in results) / len(waits),
        "put_p50_ms": 1e3 * percentile(waits, 50),
        "put_p99_ms": 1e3 * percentile(waits, 99),
        "put_max_ms": 1e3 * max(waits),
        "block_ms": 1e3 * max(result["block"] for result in results),
        "close_ms": 1e3 * max(result["close"] for result in results),
        "memory_mb": max(result["memory"] for result in results) / MEGABYTE,
        "disk_kb_per_call": max(result["disk_bytes"] for result in results) / 1024 / len(waits),
    }
    for step in ("freeze", "read", "drop"):
        if step in results[0]:
            found[f"{step}_ms_per_rollout"] = 1e3 * sum(result[step] for result in results) / rollouts
    return found


def medians(repeats: Sequence[Figures]) -> Figures:
    """The median of each figure."""
    return {name: median(repeat[name] for repeat in repeats) for name in repeats[0]}
