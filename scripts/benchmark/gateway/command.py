"""The command line of ``scripts/bench gateway``."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmark.campaign import Bench
from benchmark.gateway.campaign import CONCURRENCY, MODES, WORKERS, Cells, Plan, judge, measure_shape
from benchmark.gateway.conversations import SHAPES
from benchmark.gateway.servers import KINDS, installed
from benchmark.limits import Outcome
from benchmark.machine import describe_machine, disk
from benchmark.report import as_json, outcome_table, table

DIRECT = "direct"
_COLUMNS = {
    "calls_per_second": "calls/s",
    "cpu_ms_per_call": "CPU, ms",
    "p50_ms": "p50, ms",
    "p99_ms": "p99, ms",
    "first_ms": "first byte, ms",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    if sys.platform != "linux":
        print("scripts/bench gateway reads /proc, which only Linux has", file=sys.stderr)
        return 2
    options = parser().parse_args(arguments)
    warnings.simplefilter("ignore")  # about this machine's SQLite
    plan = Plan(
        options.server or [DIRECT, *installed()],
        options.shape or list(SHAPES),
        options.mode or list(MODES),
        options.concurrency,
        options.workers,
        options.seconds,
        options.paced,
    )
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tokcap-bench-", dir=options.directory) as root:
        bench = Bench(Path(root), options.repeats)
        machine = describe_machine(Path(root))
        cells: Cells = {}
        for shape in plan.shapes:
            cells |= measure_shape(bench, shape, plan)
        outcomes = list(judge(cells, Path(root)))
    if options.trial:
        outcomes = [replace(outcome, bound=None) for outcome in outcomes]
    machine["seconds"] = round(time.monotonic() - started)
    if options.json:
        print(json.dumps(as_json(machine, cells, outcomes), indent=2))
    else:
        print(", ".join(f"{name} {value}" for name, value in machine.items()))
        print("\n".join(tables(cells, outcomes)))
    return 1 if options.check and any(outcome.holds is False for outcome in outcomes) else 0


def tables(cells: Cells, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """A table for each shape and mode, a row for each server and number of clients; then what must hold."""
    for level, subjects in cells.items():
        rows = [[level, "", *_COLUMNS.values()]]
        for subject, servers in subjects.items():
            for server, figures in servers.items():
                shown = [f"{figures[name]:,.2f}" if name in figures else "" for name in _COLUMNS]
                rows.append([subject if server == next(iter(servers)) else "", server, *shown])
        yield f"\n{table(rows)}"
    for section in dict.fromkeys(outcome.section for outcome in outcomes):
        yield f"\n{section}\n{outcome_table([outcome for outcome in outcomes if outcome.section == section])}"


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        prog="scripts/bench gateway",
        description="The gateway beside a bare proxy, no proxy, and others whose commands are on the PATH.",
    )
    choice = made.add_argument_group("what to measure")
    choice.add_argument(
        "--server", action="append", choices=[DIRECT, *KINDS], help="repeatable; default: all installed"
    )
    choice.add_argument("--shape", action="append", choices=SHAPES, help="repeatable; default: both")
    choice.add_argument("--mode", action="append", choices=MODES, help="repeatable; default: both")
    choice.add_argument("--concurrency", type=_counts, default=CONCURRENCY, metavar="N,N", help="calls at a time")
    choice.add_argument(
        "--workers", type=_counts, default=WORKERS[1:], metavar="N,N", help="beside one worker; or none"
    )
    choice.add_argument("--no-paced", dest="paced", action="store_false", help="no streams of a token every 20 ms")
    made.add_argument("--seconds", type=float, default=2.0, help="how long each run takes (default: 2)")
    made.add_argument("--repeats", type=int, default=5, help="of which the medians are shown (default: 5)")
    made.add_argument("--trial", action="store_true", help="judge nothing, as when runs are too short for that")
    made.add_argument("--json", action="store_true", help="print JSON instead of tables")
    made.add_argument("--check", action="store_true", help="exit with 1 if a limit is missed")
    made.add_argument("--directory", default=disk(), help="a directory on the disk to measure (default: %(default)s)")
    return made


def _counts(text: str) -> tuple[int, ...]:
    return () if text == "none" else tuple(int(count) for count in text.split(","))
