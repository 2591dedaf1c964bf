"""The command line: which measurements, how often, and what comes out."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmark.campaign import RESPONSE, STORE, Bench, Level, delayed
from benchmark.fsync_delay import parse_duration
from benchmark.limits import Outcome, judge_levels
from benchmark.machine import describe_machine, disk
from benchmark.memory import measure_memory
from benchmark.report import as_json, level_tables, outcome_table
from benchmark.scale import measure_scale
from benchmark.workloads import WORKLOADS
from benchmark.writers import COUNTS, measure_writers

_LEVELS = {"store": STORE, "response": RESPONSE}
# The response level of so many small calls says nothing that chat does not.
_STORE_LEVEL_ONLY = {"crowd"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["gateway"]:
        from benchmark.gateway.command import main as gateway

        return gateway(arguments[1:])
    if arguments[:1] == ["databases"]:
        from benchmark.databases import main as databases

        return databases(arguments[1:])
    if arguments[:1] == ["dialects"]:
        from benchmark.dialects import main as dialects

        return dialects(arguments[1:])
    if arguments[:1] == ["continuity"]:
        from benchmark.gateway.continuity import main as continuity

        return continuity(arguments[1:])
    if arguments[:1] == ["traces"]:
        from benchmark.gateway.traces import main as traces

        return traces(arguments[1:])
    options = parser().parse_args(arguments)
    chosen = (options.workload, options.level, options.fsync_delay, options.processes)
    everything = not any(chosen) and not (options.scale or options.memory)
    warnings.simplefilter("ignore")  # about this machine's SQLite
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tokcap-bench-", dir=options.directory) as root:
        bench = Bench(Path(root), options.repeats, options.shrink)
        machine = describe_machine(Path(root))
        outcomes = list(measure(bench, options, everything))
    if bench.shrink > 1:
        outcomes = [replace(outcome, bound=None) for outcome in outcomes]
    machine["seconds"] = round(time.monotonic() - started)
    if options.json:
        print(json.dumps(as_json(machine, bench.cells, outcomes), indent=2))
    else:
        print_report(machine, bench, outcomes)
    missed = [outcome for outcome in outcomes if outcome.holds is False]
    return 1 if options.check and missed else 0


def measure(bench: Bench, options: argparse.Namespace, everything: bool) -> Iterable[Outcome]:
    """Take the measurements that were asked for."""
    workloads = [WORKLOADS[name] for name in options.workload or WORKLOADS]
    if everything or options.workload or options.level or options.fsync_delay:
        levels = chosen_levels(options, everything)
        for workload in workloads:
            fitting = [level for level in levels if level is not RESPONSE or workload.name not in _STORE_LEVEL_ONLY]
            bench.measure(workload, fitting)
        yield from judge_levels(bench.cells)
    if everything or options.processes:
        workload = WORKLOADS[(options.workload or ["crowd"])[0]]
        yield from measure_writers(bench, workload, options.processes or COUNTS)
    if everything or options.scale:
        yield from measure_scale(bench)
    if everything or options.memory:
        yield from measure_memory(bench)


def chosen_levels(options: argparse.Namespace, everything: bool) -> list[Level]:
    """The levels to measure at."""
    if everything:
        return [STORE, delayed(0.005), RESPONSE]
    levels = [_LEVELS[name] for name in options.level]
    if options.fsync_delay:
        return [*levels, delayed(options.fsync_delay)]
    return levels or list(_LEVELS.values())


def print_report(machine: dict[str, Any], bench: Bench, outcomes: Sequence[Outcome]) -> None:
    """Tables: what was measured, then what had to be reached."""
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    for text in level_tables(bench.cells):
        print(f"\n{text}")
    for section in dict.fromkeys(outcome.section for outcome in outcomes):
        print(f"\n{outcome_table([outcome for outcome in outcomes if outcome.section == section])}")
    if bench.shrink > 1:
        print("\nWorkloads were shrunk: the numbers say nothing.")


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Our store against plain JSON lines, on the same calls. Without a choice: everything.",
        epilog="scripts/bench gateway --help: the gateway beside a bare proxy and others. scripts/bench dialects, "
        "continuity and traces: what translation, --continuity and metrics with spans cost.",
    )
    choice = made.add_argument_group("what to measure")
    choice.add_argument("--workload", action="append", choices=WORKLOADS, default=[], help="repeatable; default: all")
    choice.add_argument("--level", action="append", choices=_LEVELS, default=[], help="repeatable; default: both")
    choice.add_argument(
        "--fsync-delay", type=_duration, metavar="TIME", help="the store level with each fsync TIME longer, such as 5ms"
    )
    choice.add_argument(
        "--processes", type=_counts, metavar="N,N", help="so many writer processes, such as 1,8 (limits need 1 and 8)"
    )
    choice.add_argument("--scale", action="store_true", help="long rollouts, and files of many rollouts")
    choice.add_argument("--memory", action="store_true", help="peak memory of storing and building")
    made.add_argument("--repeats", type=int, default=5, help="of which the medians are shown (default: 5)")
    made.add_argument("--json", action="store_true", help="print JSON instead of tables")
    made.add_argument("--check", action="store_true", help="exit with 1 if a limit is missed")
    made.add_argument("--directory", default=disk(), help="a directory on the disk to measure (default: %(default)s)")
    made.add_argument("--shrink", type=int, default=1, metavar="N", help="divide all sizes by N, to try this out")
    return made


def _duration(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _counts(text: str) -> list[int]:
    return [int(count) for count in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
