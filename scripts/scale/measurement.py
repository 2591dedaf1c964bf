"""How long commands and views take on a database with many rollouts, and whether writers notice.

Times are the best of some runs; beside each stands its ratio to one ``SELECT count(*) FROM entries``,
which a machine's speed does not change.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from scale.contention import compare
from token_id_capture.explanation import call_tree
from token_id_capture.store import RolloutFilter, TokenCaptureStore
from token_id_capture.store.evidence import read_evidence
from token_id_capture.store.reading import read_only
from token_id_capture.store.sql_access import sql_reader

VIEWS: Final = ("rollout_overview", "kept_evidence", "lost_calls", "late_calls", "call_chain", "call_tokens")
FILTERS: Final = {
    "": RolloutFilter(),
    "--state frozen": RolloutFilter(state="frozen"),
    "--masked": RolloutFilter(masked=True),
    "--incomplete": RolloutFilter(incomplete=True),
    "--model policy-70b": RolloutFilter(model="policy-70b"),
    "--since 2999-01-01 (none)": RolloutFilter(opened_since=3.2e10),
    "--model nothing (none)": RolloutFilter(model="nothing"),
}
_RUNS: Final = 5

Measured = tuple[str, float, int]


def best(work: Callable[[], int]) -> tuple[float, int]:
    """The shortest time in seconds, and what ``work`` counted."""
    times, count = [], 0
    for _ in range(_RUNS):
        started = time.perf_counter()
        count = work()
        times.append(time.perf_counter() - started)
    return min(times), count


def in_process(path: Path, rollout_id: str) -> Iterator[Measured]:
    """What commands do once Python has started."""
    with sql_reader(path) as reader:

        def rows(statement: str) -> Callable[[], int]:
            def run() -> int:
                with reader.query(statement) as (_, pages):
                    return sum(map(len, pages))

            return run

        yield "SELECT count(*) FROM entries", *best(rows("SELECT count(*) FROM entries"))
        for view in VIEWS:
            yield f"{view}, first 50 rows", *best(rows(f"SELECT * FROM {view} LIMIT 50"))
            yield f"{view}, one rollout", *best(rows(f"SELECT * FROM {view} WHERE rollout_id = '{rollout_id}'"))
        for column in ("state", "latest_outcome, latest_reason"):
            statement = f"SELECT {column}, count(*) FROM rollout_overview GROUP BY {column}"
            yield f"rollout_overview, all by {column}", *best(rows(statement))

    for options, wanted in FILTERS.items():
        yield f"ls {options}".strip(), *best(lambda wanted=wanted: asyncio.run(_list(path, wanted)))

    def evidence() -> int:
        with read_only(path) as connection:
            return len(call_tree(read_evidence(connection, rollout_id).snapshot.entries).calls)

    yield f"show and explain: read and build {rollout_id}", *best(evidence)


async def _list(path: Path, wanted: RolloutFilter) -> int:
    store = TokenCaptureStore(path, create=False)
    try:
        return len(await store.list_rollouts("", 50, wanted))
    finally:
        await store.close()


def as_commands(path: Path, rollout_id: str) -> Iterator[Measured]:
    """Whole commands, start and imports included."""
    tokcap = str(Path(sys.executable).with_name("tokcap"))
    for arguments in (
        ["--version"],
        ["ls"],
        ["ls", "--masked"],
        ["show", rollout_id],
        ["explain", rollout_id],
        ["sql", "SELECT * FROM rollout_overview LIMIT 50"],
    ):
        command = [tokcap, *arguments, *([] if arguments == ["--version"] else ["--database", str(path)])]

        def run(command: list[str] = command) -> int:
            shown = subprocess.run(command, capture_output=True, text=True, check=True)
            return len(shown.stdout.splitlines())

        yield f"$ tokcap {' '.join(arguments)}", *best(run)


def report(measured: Iterator[Measured], unit: float) -> float:
    """Print a line each; returns the first time, which is the unit if none is given."""
    for what, seconds, count in measured:
        unit = unit or seconds
        print(f"{what:58}{seconds * 1000:10.1f} ms{seconds / unit:9.1f} x{count:9,} rows")
    return unit


def main() -> None:
    """Run ``scripts/measure_queries``."""
    parser = argparse.ArgumentParser(prog="scripts/measure_queries", description=__doc__)
    parser.add_argument("database", type=Path, help="a file of scripts/make_database")
    parser.add_argument("--rollout", default="zz-long", help="the rollout to show and to explain")
    parser.add_argument("--writers", type=int, default=0, metavar="N", help="also let N processes write to it")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long they write, without and with readers")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # about this machine's SQLite
    unit = report(in_process(arguments.database, arguments.rollout), 0.0)
    report(as_commands(arguments.database, arguments.rollout), unit)
    if arguments.writers:
        results: dict[str, Any] = compare(arguments.database, arguments.writers, arguments.seconds)
        for name, values in results.items():
            print(f"{name:24}" + "".join(f"{key} {value:<14}" for key, value in values.items()))


if __name__ == "__main__":
    main()
