"""Does a put cost more in a long rollout, or in a file of many rollouts?"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmark.campaign import Bench, Figures, figures
from benchmark.inputs import write_inputs
from benchmark.limits import Outcome
from benchmark.processes import Job, run_together
from benchmark.workloads import WORKLOADS

FEW, MANY = 10, 100_000
BOUND = 1.3
# Spread over the index, so that new rollouts come to lie in between in many places.
_FILLER = "printf('chat-%d-x%d', n % 64, n)"


def measure_scale(bench: Bench) -> Iterator[Outcome]:
    """The costs with many rollouts over those with few, and those of late calls over early ones."""
    many = max(FEW, MANY // bench.shrink)
    workload = bench.sized(WORKLOADS["chat"])
    with bench.directory("scale") as root:
        write_inputs(workload, root, ("arrays",))
        for count in (FEW, many):
            bench.say(f"scale: a file of {count:,} rollouts")
            fill(root / str(count), count)
        found = bench.interleaved(
            {f"{count:,} rollouts": _put_into(root / str(count), root) for count in (FEW, many)}
            | {"growth": _grow(bench)}
        )
    growth = found.pop("growth")
    bench.cells["scale"] = {"chat": found}
    few, full = found.values()
    title = f"put in a file of {many:,} rollouts / of {FEW}"
    yield Outcome("scale", title, "CPU", full["cpu_us_per_call"] / few["cpu_us_per_call"], False, BOUND)
    yield Outcome("scale", title, "p50", full["put_p50_ms"] / few["put_p50_ms"], False, BOUND)
    title = "put at the end of a rollout of 1,000 calls / at its beginning"
    yield Outcome("scale", title, "CPU", growth["late"] / growth["early"], False, BOUND)


def _put_into(directory: Path, inputs: Path) -> Callable[[], Figures]:
    repeats = iter(range(1_000_000))

    def run() -> Figures:
        arguments = {"store": "ours", "level": "store", "inputs": str(inputs), "directory": str(directory)}
        job = Job("play", {**arguments, "suffix": f"-{next(repeats)}"})
        return figures(run_together([job]))

    return run


def _grow(bench: Bench) -> Callable[[], Figures]:
    def run() -> Figures:
        with bench.directory() as directory:
            arguments = {"directory": str(directory), "calls": max(50, 1000 // bench.shrink), "prompt": 4096}
            return run_together([Job("growth", arguments)])[0]

    return run


def fill(directory: Path, rollouts: int) -> None:
    """Make a database that holds so many rollouts of one small call: one is put, and its rows are multiplied."""
    directory.mkdir()
    asyncio.run(_put_template(directory))
    (database,) = directory.glob("*.db")
    connection = sqlite3.connect(database)
    with connection:
        tables = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
        for (table,) in tables:
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})") if row[1] != "rollout_id"]
            if table in ("rollouts", "entries"):
                listed = ", ".join(columns)
                connection.execute(
                    "WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n + 1 < ?) "
                    f"INSERT INTO {table} (rollout_id, {listed}) "
                    f"SELECT {_FILLER}, {listed} FROM numbers, {table} WHERE rollout_id = 'filler'",
                    (rollouts,),
                )
    (stored,) = connection.execute("SELECT count(*) FROM entries").fetchone()
    connection.close()
    assert stored == rollouts


async def _put_template(directory: Path) -> None:
    from token_id_capture import LogProbs, TokenCaptureStore, TokenEntry, TokenIds

    async with TokenCaptureStore(directory) as store:
        entry = TokenEntry(
            rollout_id="filler",
            model_call_id="0" * 32,
            prompt_token_ids=TokenIds(range(100, 132)),
            generation_token_ids=TokenIds(range(100, 116)),
            generation_log_probs=LogProbs([-0.5] * 16),
        )
        await store.put(entry)
