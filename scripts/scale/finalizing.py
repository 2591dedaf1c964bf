"""How much longer ``tokcap finalize`` takes where rollouts have several sequences.

Each rollout has the same calls twice: once as one conversation, once as a main agent and sub-agents. Both
databases are finalized, in turn, as trajectories; the ratio of processor time per rollout and the peak
memory of the larger and of a tenth of it are printed as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore

SEQUENCES = 5
TURNS = 3
SAMPLED = 20
ADDED = 40
AT_ONCE = 200


def calls(rollout: str, sequences: int, turns: int = SEQUENCES * TURNS) -> Iterator[TokenEntry]:
    """So many turns, as one conversation or as several agents of equally many."""
    prompt: list[int] = []
    for number in range(turns):
        agent, turn = divmod(number, turns // sequences)
        if turn == 0:
            prompt = [7, 100 + agent]
        prompt = [*prompt, *range(1000, 1000 + ADDED)]
        sampled = list(range(2000 + number, 2000 + number + SAMPLED))
        yield TokenEntry(
            rollout_id=rollout,
            model_call_id=f"call-{number:02}",
            prompt_token_ids=prompt,
            generation_token_ids=sampled,
            generation_log_probs=[-0.5] * SAMPLED,
            agent="main" if agent == 0 else f"sub-{agent}",
            parent_agent=None if agent == 0 else "main",
            finish_reason="stop",
            created_at=float(number),
        )
        prompt = [*prompt, *sampled]


def filled(database: Path, rollouts: int, sequences: int, turns: int = SEQUENCES * TURNS) -> Path:
    """The database with all calls of all rollouts."""
    # In a process of its own: a child starts with its parent's peak memory, and would report it as its own.
    filling = multiprocessing.get_context("spawn").Process(target=fill, args=(database, rollouts, sequences, turns))
    filling.start()
    filling.join()
    if filling.exitcode:
        raise SystemExit("the database could not be filled")
    return database


def fill(database: Path, rollouts: int, sequences: int, turns: int) -> None:
    """Store all calls of all rollouts."""
    asyncio.run(store_all(database, rollouts, sequences, turns))


async def store_all(database: Path, rollouts: int, sequences: int, turns: int) -> None:
    """The same, in an event loop."""
    async with TokenCaptureStore(database) as store:
        for start in range(0, rollouts, AT_ONCE):
            numbers = range(start, min(start + AT_ONCE, rollouts))
            entries = (entry for number in numbers for entry in calls(f"{number}-0", sequences, turns))
            await asyncio.gather(*map(store.put, entries))


def finalize(database: Path, rollouts: int, scratch: Path) -> tuple[float, float, int]:
    """Processor seconds a rollout, peak memory in MB, and the rows that were written."""
    records, output = scratch / "records.jsonl", scratch / f"rows-{database.stem}-{rollouts}.jsonl"
    records.write_text(
        "".join(f'{{"_ng_task_index": {number}, "_ng_rollout_index": 0}}\n' for number in range(rollouts))
    )
    options = ["--format", "trajectory", "--sequences", "all", "--database", str(database), "--output", str(output)]
    command = [sys.executable, "-m", "token_id_capture", "finalize", str(records), *options]
    pid = os.posix_spawn(sys.executable, command, dict(os.environ))
    _, status, used = os.wait4(pid, 0)
    if status:
        raise SystemExit(f"tokcap finalize ended with {os.waitstatus_to_exitcode(status)}")
    rows = output.read_bytes().count(b"\n")
    output.unlink()
    return (used.ru_utime + used.ru_stime) / rollouts, used.ru_maxrss / 1024, rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=10_000, help="rollouts in each database (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, of which the median counts (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        found: dict[int, list[tuple[float, float, int]]] = {1: [], SEQUENCES: []}
        for sequences in found:
            filled(scratch / f"{sequences}.db", options.rollouts, sequences)
        for _ in range(options.repeats):
            for sequences, runs in found.items():
                runs.append(finalize(scratch / f"{sequences}.db", options.rollouts, scratch))
        _, memory_of_tenth, _ = finalize(scratch / f"{SEQUENCES}.db", max(1, options.rollouts // 10), scratch)
    seconds = {sequences: statistics.median(run[0] for run in runs) for sequences, runs in found.items()}
    result = {
        "rollouts": options.rollouts,
        "rows": {sequences: runs[0][2] for sequences, runs in found.items()},
        "CPU ms a rollout": {sequences: round(value * 1000, 3) for sequences, value in seconds.items()},
        "ratio": round(seconds[SEQUENCES] / seconds[1], 3),
        "peak MB": round(max(run[1] for run in found[SEQUENCES]), 1),
        "peak MB of a tenth": round(memory_of_tenth, 1),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
