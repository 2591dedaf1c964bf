"""How long commands and views take on a database with many rollouts, and whether writers notice.

Times are the best of some rounds through all of them; beside each stands its ratio to one ``SELECT
count(*) FROM entries``, which a machine's speed does not change.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from scale.contention import commands, compare, show
from scale.templates import chain_of
from token_id_capture import explanation
from token_id_capture.lifecycle import State
from token_id_capture.store import RolloutFilter
from token_id_capture.store.file.read_only import read_only
from token_id_capture.store.read.evidence import read_evidence
from token_id_capture.store.read.histories import find_calls
from token_id_capture.store.read.listing import list_rollouts
from token_id_capture.store.read.sql import SqlReader, sql_reader

VIEWS: Final = ("rollout_overview", "kept_evidence", "lost_calls", "late_calls", "call_chain", "call_tokens")
FILTERS: Final = {
    "": RolloutFilter(),
    "--state frozen": RolloutFilter(state=State.FROZEN),
    "--masked": RolloutFilter(masked=True),
    "--incomplete": RolloutFilter(incomplete=True),
    "--model policy-70b": RolloutFilter(model="policy-70b"),
    "--since 2999-01-01 (none)": RolloutFilter(opened_since=3.2e10),
    "--model nothing (none)": RolloutFilter(model="nothing"),
}
UNIT: Final = "SELECT count(*) FROM entries"
# It reads and writes the whole database, in the time that this takes.
_ONCE: Final = {"tokcap export"}
_CHAINS: Final = 40

Work = Callable[[], int]


def statements(reader: SqlReader, rollout_id: str) -> Iterator[tuple[str, Work]]:
    """What the views cost, without the start of a command."""

    def counting(statement: str) -> Work:
        def run() -> int:
            with reader.query(statement) as (_, pages):
                return sum(map(len, pages))

        return run

    yield UNIT, counting(UNIT)
    for view in VIEWS:
        yield f"{view}, first 50 rows", counting(f"SELECT * FROM {view} LIMIT 50")
        yield f"{view}, one rollout", counting(f"SELECT * FROM {view} WHERE rollout_id = '{rollout_id}'")
    for column in ("state", "latest_outcome, latest_reason"):
        grouped = f"SELECT {column}, count(*) FROM rollout_overview GROUP BY {column}"
        yield f"rollout_overview, all by {column}", counting(grouped)


def reads(path: Path, rollout_id: str) -> Iterator[tuple[str, Work]]:
    """What commands do once Python has started."""

    def listing(wanted: RolloutFilter) -> Work:
        def run() -> int:
            with read_only(path) as connection:
                return len(list_rollouts(connection.execute, "", 50, wanted))

        return run

    def explaining() -> int:
        with read_only(path) as connection:
            evidence = read_evidence(connection, rollout_id)
        return len(explanation.explain(explanation.stored_rollout(evidence)).findings)

    for options, wanted in FILTERS.items():
        yield f"ls {options}, in process".replace(" ,", ","), listing(wanted)
    yield f"explain {rollout_id}, in process", explaining


def looked_up(connection: sqlite3.Connection) -> Iterator[tuple[str, Work]]:
    """What a gateway with ``--continuity`` asks for each request that has a history."""
    open_rollouts = connection.execute("SELECT DISTINCT rollout_id FROM call_histories LIMIT 200").fetchall()
    chains = list(map(chain_of, range(_CHAINS)))
    if open_rollouts:
        ((rollout_id,), *_) = reversed(open_rollouts)
        yield (
            f"continuity, the calls of {_CHAINS} chains",
            lambda: len(find_calls(connection.execute, rollout_id, chains)),
        )


def whole_commands(path: Path, rollout_id: str, output: Path) -> Iterator[tuple[str, Work]]:
    """Commands from start to end, their imports included; counts the lines that they print."""
    given = commands(path, rollout_id, output)
    tokcap = next(iter(given.values()))[0]
    more = {"--help": [tokcap, "--help"], "ls --masked": [*given["ls"], "--masked"]}
    for name, command in {**more, **given}.items():

        def run(command: list[str] = command) -> int:
            shown = subprocess.run(command, capture_output=True, text=True, check=True)
            return len(shown.stdout.splitlines())

        yield f"tokcap {name}", run


def measure(path: Path, rollout_id: str, rounds: int) -> list[dict[str, Any]]:
    """One row for each: seconds, the ratio to the unit, and how many rows, findings or lines it gave."""
    best: dict[str, dict[str, Any]] = {}
    with sql_reader(path) as reader, read_only(path) as connection, tempfile.TemporaryDirectory() as output:
        works = [
            *statements(reader, rollout_id),
            *looked_up(connection),
            *reads(path, rollout_id),
            *whole_commands(path, rollout_id, Path(output)),
        ]
        for round_number in range(rounds):
            for what, work in works:
                if round_number and what in _ONCE:
                    continue
                started = time.perf_counter()
                count = work()
                seconds = time.perf_counter() - started
                if what not in best or seconds < best[what]["seconds"]:
                    best[what] = {"what": what, "seconds": seconds, "count": count}
    return [{**row, "ratio": row["seconds"] / best[UNIT]["seconds"]} for row in best.values()]


def main() -> None:
    """Run ``scripts/measure_queries``."""
    parser = argparse.ArgumentParser(prog="scripts/measure_queries", description=__doc__)
    parser.add_argument("database", type=Path, help="a file of scripts/make_database")
    parser.add_argument("--rollout", default="zz-long", help="the rollout to show and to explain")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="how often each is timed; 0: not at all")
    parser.add_argument(
        "--writers", type=int, default=0, metavar="N", help="let N processes write, with readers beside"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each reader runs beside them, each time")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="how often each reader has its turn")
    parser.add_argument("--idle", action="store_true", help="readers beside writers get only idle processors")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # about this machine's SQLite
    results: dict[str, Any] = {}
    if arguments.rounds:
        results["times"] = measure(arguments.database, arguments.rollout, arguments.rounds)
    if arguments.writers:
        results["puts"] = compare(
            arguments.database,
            arguments.rollout,
            arguments.writers,
            arguments.seconds,
            arguments.repeats,
            idle=arguments.idle,
        )
    if arguments.json:
        json.dump(results, sys.stdout, indent=1)
        return
    for row in results.get("times", ()):
        print(f"{row['what']:58}{row['seconds'] * 1000:10.2f} ms{row['ratio']:9.2f} x{row['count']:9,} rows")
    for line in show(results["puts"]) if "puts" in results else ():
        print(line)


if __name__ == "__main__":
    main()
