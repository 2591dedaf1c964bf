"""Every server on the same calls, in turn, so that a slow minute hits all of them alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from benchmark.campaign import Bench, Figures
from benchmark.gateway.servers import CHAT, KINDS, Server, running
from benchmark.limits import Outcome
from benchmark.measure import fsync_seconds, percentile
from benchmark.processes import Child, Job

MODES = {"whole": False, "streamed": True}
CONCURRENCY = (1, 16, 64, 256)
WORKERS = (1, 2, 4)
JUDGED_AT = 16
"""Calls at a time at which processor time and throughput are judged."""
WORKERS_AT = 64
PACED_STREAMS, PAUSE_MS = 64, 20

Cells = dict[str, dict[str, dict[str, Figures]]]
"""shape and mode, calls at a time, server: the medians."""


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    servers: Sequence[str]
    shapes: Sequence[str]
    modes: Sequence[str]
    concurrency: Sequence[int]
    workers: Sequence[int]
    seconds: float
    paced: bool


class Target:
    """A server under load, or the engine itself."""

    def __init__(self, url: str, server: Server | None) -> None:
        self._url = url if server is None else server.url
        self._path = CHAT if server is None else server.path
        self._server = server
        self.calls = 0

    def load(self, rollouts: str, **arguments: Any) -> Figures:
        """Ask it for a while; what the clients saw and its processes spent."""
        child = Child(Job("gateway.load", {"url": self._url, "path": self._path, "rollouts": rollouts, **arguments}))
        try:
            child.wait_until_ready()
            before = self._cpu()
            child.go()
            seen = child.result()
            spent = self._cpu() - before
        finally:
            child.kill()
        calls = len(seen["whole"])
        self.calls += calls + seen["warm_up"]
        found = {
            "calls_per_second": calls / seen["seconds"],
            "p50_ms": 1e3 * percentile(seen["whole"], 50),
            "p99_ms": 1e3 * percentile(seen["whole"], 99),
            "first_ms": 1e3 * percentile(seen["first"], 50),
        }
        return found if self._server is None else {**found, "cpu_ms_per_call": 1e3 * spent / calls}

    def _cpu(self) -> float:
        return 0.0 if self._server is None else self._server.cpu()


def measure_shape(bench: Bench, shape: str, plan: Plan) -> Cells:
    """All servers on one shape of conversations."""
    cells: Cells = {}
    names = (f"{shape}-{number}" for number in count())

    def measure(targets: Mapping[str, Target], mode: str, subject: str, **arguments: Any) -> None:
        bench.say(f"{shape}, {mode}: {subject}")
        runs: dict[str, Callable[[], Figures]] = {
            name: lambda target=target: target.load(  # type: ignore[misc]
                next(names), shape=shape, streamed=mode != "whole", **arguments
            )
            for name, target in targets.items()
        }
        cells.setdefault(f"{shape}, {mode}", {})[subject] = bench.interleaved(runs)

    with bench.directory(shape) as root, ExitStack() as stack:
        engine = Child(Job("gateway.engine", {"shape": shape}))
        stack.callback(engine.kill)
        url = engine.wait_until_ready()["url"]
        targets = {
            name: Target(url, stack.enter_context(running(name, url, root / name)) if name in KINDS else None)
            for name in plan.servers
        }
        for mode in plan.modes:
            for clients in plan.concurrency:
                subject = f"{clients} at a time"
                measure(targets, mode, subject, concurrency=clients, pause_ms=0, seconds=plan.seconds)
        if plan.paced and shape == "chat":
            paced = {"concurrency": PACED_STREAMS, "pause_ms": PAUSE_MS, "seconds": 0.0}
            measure(targets, "paced", f"{PACED_STREAMS} at a time, a token every {PAUSE_MS} ms", **paced)
        _check_captured(targets, stack, root)
    for workers in plan.workers:
        _measure_workers(bench, shape, plan, workers, measure)
    return cells


def _measure_workers(bench: Bench, shape: str, plan: Plan, workers: int, measure: Callable[..., None]) -> None:
    with bench.directory(shape) as root, ExitStack() as stack:
        engine = Child(Job("gateway.engine", {"shape": shape}))
        stack.callback(engine.kill)
        url = engine.wait_until_ready()["url"]
        several = [name for name in plan.servers if name in KINDS and KINDS[name].several_workers]
        targets = {
            name: Target(url, stack.enter_context(running(name, url, root / name, workers=workers))) for name in several
        }
        for mode in plan.modes:
            subject = f"{WORKERS_AT} at a time, {workers} workers"
            measure(targets, mode, subject, concurrency=WORKERS_AT, pause_ms=0, seconds=plan.seconds)
        _check_captured(targets, stack, root)


def _check_captured(targets: Mapping[str, Target], stack: ExitStack, root: Path) -> None:
    """End the servers; every call through ours is in its store.

    Raises:
        RuntimeError: some are not, so its figures say nothing.
    """
    stack.close()
    if "ours" in targets:
        stored = asyncio.run(_stored_calls(root / "ours" / "captures.db"))
        if stored != targets["ours"].calls:
            raise RuntimeError(f"{stored} of {targets['ours'].calls} calls were captured")


async def _stored_calls(database: Path) -> int:
    from token_id_capture import TokenCaptureStore

    async with TokenCaptureStore(database) as store:
        return sum(rollout.calls or 0 for rollout in await store.list_rollouts(limit=1_000_000))


_CPU = {"chat, whole": 1.6, "chat, streamed": 1.6, "agent, whole": 2.0, "agent, streamed": 1.6}
_CALLS = 0.6
_CALLS_TO_RLLM = {"chat, whole": 6.0, "chat, streamed": 4.0, "agent, whole": 8.0, "agent, streamed": 4.0}
_ABOVE_BARE_MS = 2.0
_FIRST_LATER = 0.1


def judge(cells: Cells, root: Path) -> Iterator[Outcome]:
    """Ours against the bare proxy and the others."""
    for level, bound in _CPU.items():
        found = cells.get(level, {}).get(f"{JUDGED_AT} at a time", {})
        if "ours" not in found:
            continue
        ours = found["ours"]
        for other, least in (("bare", _CALLS), ("rllm", _CALLS_TO_RLLM[level])):
            if other in found:
                ratio = ours["calls_per_second"] / found[other]["calls_per_second"]
                yield Outcome("gateway", f"calls/s, ours / {other}", level, ratio, True, least)
        if "bare" in found:
            ratio = ours["cpu_ms_per_call"] / found["bare"]["cpu_ms_per_call"]
            yield Outcome("gateway", "CPU per call, ours / bare", level, ratio, False, bound)
    alone = cells.get("chat, whole", {}).get("1 at a time", {})
    if {"ours", "bare"} <= alone.keys():
        above = alone["ours"]["p50_ms"] - alone["bare"]["p50_ms"]
        bound = _ABOVE_BARE_MS + 2e3 * fsync_seconds(root)
        yield Outcome("one at a time", "p50 above bare's, ms", "chat, whole", above, False, round(bound, 2))
    for paced in cells.get("chat, paced", {}).values():
        if {"ours", "bare"} <= paced.keys():
            ratio = paced["ours"]["cpu_ms_per_call"] / paced["bare"]["cpu_ms_per_call"]
            yield Outcome("paced streams", "CPU per call, ours / bare", "chat", ratio, False, _CPU["chat, streamed"])
            later = (paced["ours"]["first_ms"] - paced["bare"]["first_ms"]) / paced["bare"]["p50_ms"]
            title = "first event later than bare's, as a part of the stream"
            yield Outcome("paced streams", title, "chat", later, False, _FIRST_LATER)
