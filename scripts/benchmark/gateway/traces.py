"""``scripts/bench traces``: what metrics and spans cost the gateway's processes, in processor time for a call.

Gateways that differ in nothing else stand before one engine and get the same chats in turn: without metrics and
spans, with metrics, and with spans too, of which all, some or none are sampled. Each round ends when the spans are
sent, so that the thread that sends them counts as well.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Final

from benchmark.campaign import Figures
from benchmark.gateway.servers import UNOBSERVED, Server, running
from benchmark.limits import Outcome
from benchmark.machine import describe_machine, disk
from benchmark.processes import Child, Job
from benchmark.report import as_json, outcome_table, table

_BOUND: Final = 1.03
_NONE: Final = "none"
_SEND_SECONDS: Final = 1.0
_SAMPLED: Final[Mapping[str, str | None]] = {
    _NONE: None,
    "metrics": None,
    "metrics, 0 % sampled": "0",
    "metrics, 1 % sampled": "0.01",
    "metrics, 10 % sampled": "0.1",
    "metrics, all sampled": "1",
}
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
    """One gateway, and what a call cost it in each round."""

    name: str
    server: Server
    calls: int = 0
    spent: list[float] = field(default_factory=list)

    def measure(self, number: int, concurrency: int, seconds: float) -> None:
        arguments = {"url": self.server.url, "path": self.server.path, "rollouts": f"round-{number}"}
        child = Child(
            Job(
                "gateway.load",
                {
                    **arguments,
                    **{"shape": "chat", "streamed": False, "pause_ms": 0},
                    **{"concurrency": concurrency, "seconds": seconds},
                },
            )
        )
        try:
            child.wait_until_ready()
            time.sleep(2 * _SEND_SECONDS)  # what was asked to warm up is sent
            before = self.server.running_seconds()
            child.go()
            seen = child.result()
            time.sleep(2 * _SEND_SECONDS)
            spent = self.server.running_seconds() - before
        finally:
            child.kill()
        self.calls += len(seen["whole"]) + seen["warm_up"]
        self.spent.append(spent / len(seen["whole"]))


def _measured(root: Path, options: argparse.Namespace) -> list[_Subject]:
    engine = Child(Job("gateway.engine", {"shape": "chat"}))
    try:
        url = engine.wait_until_ready()["url"]
        with ExitStack() as stack:
            collector = stack.enter_context(_collecting())
            subjects = []
            for place, (name, ratio) in enumerate(_SAMPLED.items()):
                variables = {
                    "OTEL_EXPORTER_OTLP_ENDPOINT": f"{collector.url}/{place}",
                    "OTEL_BSP_SCHEDULE_DELAY": str(round(1000 * _SEND_SECONDS)),
                    "OTEL_TRACES_SAMPLER": "traceidratio",
                    "OTEL_TRACES_SAMPLER_ARG": ratio or "0",
                }
                further = () if ratio is None else ("--traces",)
                kind = UNOBSERVED if name == _NONE else "ours"
                started = running(kind, url, root / str(place), further=further, variables=variables)
                subjects.append(_Subject(name, stack.enter_context(started)))
            for number in range(options.repeats):
                for subject in subjects[:: 1 if number % 2 else -1]:
                    subject.measure(number, options.concurrency, options.seconds)
            received = collector.spans[str(len(subjects) - 1)]
            if received != subjects[-1].calls:
                raise RuntimeError(f"{received} spans of {subjects[-1].calls} calls came, so nothing was measured")
        return subjects
    finally:
        engine.kill()


def _judged(subjects: Sequence[_Subject]) -> Iterator[Outcome]:
    """Each against the one without, round by round, as the machine is not equally fast in all of them."""
    bare = subjects[0].spent
    for subject in subjects[1:]:
        ratio = median(one / other for one, other in zip(subject.spent, bare, strict=True))
        yield Outcome("traces", f"CPU per call, {subject.name} / {_NONE}", "chat, whole", ratio, False, _BOUND)


def main(arguments: Sequence[str]) -> int:
    """Measure and report; returns the exit code."""
    if sys.platform != "linux":
        print("scripts/bench traces reads /proc, which only Linux has", file=sys.stderr)
        return 2
    made = argparse.ArgumentParser(prog="scripts/bench traces", description=__doc__)
    made.add_argument("--concurrency", type=int, default=16, help="calls at a time (default: 16)")
    made.add_argument("--seconds", type=float, default=2.0, help="how long each run takes (default: 2)")
    made.add_argument("--repeats", type=int, default=9, help="of each gateway, in turn (default: 9)")
    made.add_argument("--trial", action="store_true", help="judge nothing, as when runs are too short for that")
    made.add_argument("--check", action="store_true", help="exit with 1 if a bound is missed")
    made.add_argument("--json", action="store_true", help="print JSON instead of tables")
    made.add_argument("--directory", default=disk(), help="a directory on the disk to measure (default: %(default)s)")
    options = made.parse_args(arguments)
    warnings.simplefilter("ignore")  # about this machine's SQLite
    with tempfile.TemporaryDirectory(prefix="tokcap-bench-", dir=options.directory) as folder:
        machine = describe_machine(Path(folder))
        subjects = _measured(Path(folder), options)
    outcomes = [replace(it, bound=None) if options.trial else it for it in _judged(subjects)]
    cells: dict[str, Figures] = {it.name: {"cpu_ms_per_call": 1e3 * median(it.spent)} for it in subjects}
    if options.json:
        print(json.dumps(as_json(machine, {"traces": {"chat, whole": cells}}, outcomes), indent=2))
    else:
        print(", ".join(f"{name} {value}" for name, value in machine.items()))
        rows = [[name, f"{figures['cpu_ms_per_call']:.3f}"] for name, figures in cells.items()]
        print(f"\n{table([['', 'CPU per call, ms'], *rows])}\n\n{outcome_table(outcomes)}")
    return int(options.check and any(outcome.holds is False for outcome in outcomes))
