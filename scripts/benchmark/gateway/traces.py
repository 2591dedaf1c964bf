"""``scripts/bench traces``: what metrics and spans cost the gateway's processes, in processor time for a call.

Gateways that differ in nothing else stand before one engine and get the same chats in turn, one at a time: without
metrics and spans, with metrics, and with spans too, of which all or none are sampled. What it takes to send the spans
is measured when a batch is full, and added. A part of the rollouts costs its part of the difference.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Final

import aiohttp

from benchmark.campaign import Figures
from benchmark.gateway.conversations import SHAPES, Question, questions
from benchmark.gateway.servers import UNOBSERVED, Server, running
from benchmark.limits import Outcome
from benchmark.machine import describe_machine, disk
from benchmark.measure import percentile
from benchmark.processes import Child, Job
from benchmark.report import as_json, outcome_table, table

_BOUND: Final = 1.03
_BATCH: Final = 512
"""Spans in a request, by default."""
_PATIENCE: Final = 60.0
_HEADERS: Final = {"content-type": "application/json"}
_NONE, _DROPPED, _ALL = "none", "metrics, 0 % sampled", "metrics, all sampled"
_PARTS: Final = (0.1, 0.01)
_SAMPLED: Final[Mapping[str, str | None]] = {_NONE: None, "metrics": None, _DROPPED: "0", _ALL: "1"}
"""By the name of a gateway the part of its rollouts that is sampled; None without ``--traces``."""


class _Collector(ThreadingHTTPServer):
    """Takes spans, and counts them by the first part of the path."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receiver)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.spans: Counter[str] = Counter()


class _Receiver(BaseHTTPRequestHandler):
    server: _Collector

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["content-length"]))
        found = [
            len(scope.spans)
            for it in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in it.scope_spans
        ]
        self.server.spans[self.path.split("/")[1]] += sum(found)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002  the name is the base class's
        """Nothing: what is posted is counted."""


@contextmanager
def _collecting() -> Iterator[_Collector]:
    with _Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever, daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            collector.shutdown()


@dataclass
class _Subject:
    """One gateway, and the processor seconds of each of its calls, and of sending each batch of its spans."""

    server: Server
    calls: int = 0
    spent: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)

    async def ask(self, session: aiohttp.ClientSession, question: Question) -> None:
        """One call, and what it costs until the client has its response."""
        url = self.server.url + self.server.path.format(rollout=f"r{self.calls // 4}")
        self.calls += 1
        before = self.server.running_seconds()
        async with session.post(url, data=question.body(streamed=False), headers=_HEADERS) as response:
            response.raise_for_status()
            await response.read()
        self.spent.append(self.server.running_seconds() - before)

    async def sending(self, collector: _Collector, name: str) -> None:
        """What it costs until the collector has the batch, which the last call made full."""
        waiting = self.spent.pop()  # of a call that the sending may have begun within
        before = self.server.running_seconds()
        async with asyncio.timeout(_PATIENCE):
            while collector.spans[name] < self.calls:  # noqa: ASYNC110  another thread counts
                await asyncio.sleep(0.05)
        self.sent.append(max(0.0, waiting - median(self.spent)) + self.server.running_seconds() - before)


async def _measured(root: Path, batches: int) -> dict[str, _Subject]:
    """By name, each asked in turn, call by call: what the machine does beside hits all of them alike."""
    engine = Child(Job("gateway.engine", {"shape": "chat"}))
    try:
        url = engine.wait_until_ready()["url"]
        asked = [question for conversation in questions(SHAPES["chat"]) for question in conversation]
        async with aiohttp.ClientSession() as session:
            with ExitStack() as stack:
                collector = stack.enter_context(_collecting())
                subjects: dict[str, _Subject] = {}
                for place, (name, ratio) in enumerate(_SAMPLED.items()):
                    variables = {
                        "OTEL_EXPORTER_OTLP_ENDPOINT": f"{collector.url}/{place}",
                        "OTEL_BSP_SCHEDULE_DELAY": "3600000",  # so that batches go when they are full
                        "OTEL_TRACES_SAMPLER": "traceidratio",
                        "OTEL_TRACES_SAMPLER_ARG": ratio or "0",
                    }
                    further = () if ratio is None else ("--traces",)
                    kind = UNOBSERVED if name == _NONE else "ours"
                    started = running(kind, url, root / str(place), further=further, variables=variables)
                    subjects[name] = _Subject(await asyncio.to_thread(stack.enter_context, started))
                for number in range(batches * _BATCH):
                    # Rotated, not reversed: who is asked twice in a row has its caches warm.
                    order, first = [*subjects.values()], number % len(subjects)
                    for subject in order[first:] + order[:first]:
                        await subject.ask(session, asked[number % len(asked)])
                    if number % _BATCH == _BATCH - 1:
                        await subjects[_ALL].sending(collector, str(len(subjects) - 1))
        return subjects
    finally:
        engine.kill()


def _figures(subjects: Mapping[str, _Subject]) -> dict[str, float]:
    """Milliseconds of a call: of each gateway what its quickest tenth took at most, and what sending a span takes."""
    found = {name: 1e3 * percentile(subject.spent, 10) for name, subject in subjects.items()}
    sending = 1e3 * min(subjects[_ALL].sent) / _BATCH
    rise = found[_ALL] + sending - found[_DROPPED]
    sampled = {f"metrics, {part:.0%} sampled": found[_DROPPED] + part * rise for part in _PARTS}
    return {**found, _ALL: found[_ALL] + sending, **sampled}


def _judged(figures: Mapping[str, float]) -> Iterator[Outcome]:
    for name in figures:
        if name != _NONE:
            ratio = figures[name] / figures[_NONE]
            yield Outcome("traces", f"CPU per call, {name} / {_NONE}", "chat, whole", ratio, False, _BOUND)


def main(arguments: Sequence[str]) -> int:
    """Measure and report; returns the exit code."""
    if sys.platform != "linux":
        print("scripts/bench traces reads /proc, which only Linux has", file=sys.stderr)
        return 2
    made = argparse.ArgumentParser(prog="scripts/bench traces", description=__doc__)
    made.add_argument("--batches", type=int, default=2, help=f"of {_BATCH} calls of each gateway (default: 2)")
    made.add_argument("--trial", action="store_true", help="judge nothing, as when runs are too short for that")
    made.add_argument("--check", action="store_true", help="exit with 1 if a bound is missed")
    made.add_argument("--json", action="store_true", help="print JSON instead of tables")
    made.add_argument("--directory", default=disk(), help="a directory on the disk to measure (default: %(default)s)")
    options = made.parse_args(arguments)
    warnings.simplefilter("ignore")  # about this machine's SQLite
    with tempfile.TemporaryDirectory(prefix="tokcap-bench-", dir=options.directory) as folder:
        machine = describe_machine(Path(folder))
        figures = _figures(asyncio.run(_measured(Path(folder), options.batches)))
    outcomes = [replace(it, bound=None) if options.trial else it for it in _judged(figures)]
    cells: dict[str, Figures] = {name: {"cpu_ms_per_call": spent} for name, spent in figures.items()}
    if options.json:
        print(json.dumps(as_json(machine, {"traces": {"chat, whole": cells}}, outcomes), indent=2))
    else:
        print(", ".join(f"{name} {value}" for name, value in machine.items()))
        rows = [[name, f"{spent:.3f}"] for name, spent in figures.items()]
        print(f"\n{table([['', 'CPU per call, ms'], *rows])}\n\n{outcome_table(outcomes)}")
    return int(options.check and any(outcome.holds is False for outcome in outcomes))
