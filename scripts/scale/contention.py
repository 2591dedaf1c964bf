"""Whether people who look make writers wait.

Several processes write all the time, as servers do whose engines take their time. Beside them runs now
nothing, now one reading command over and over, now something that keeps a processor as busy with nothing:
period by period, in an order that changes with every repeat, so that whatever else happens on the machine
meets all of them alike. Readers take processors from writers, as anybody does: what a command does to them
beyond that is its ratio to the busy neighbour.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from token_id_capture import TokenCaptureStore, TokenEntry

ALONE: Final = "nobody"
NEIGHBOUR: Final = "a busy neighbour"
_THINKING_SECONDS: Final = 0.4
_SETTLING_SECONDS: Final = 1.0
_TIMES: Final = ("p50", "p99", "longest")
_PROMPT: Final = list(range(2_000))
_GENERATION: Final = list(range(200))

Puts = list[tuple[float, float]]
"""When each put ended, on the clock that all processes share, and how long it took, in milliseconds."""


def commands(path: Path, rollout_id: str, output: Path) -> dict[str, list[str]]:
    """The reading commands with their arguments, by the name under which they are shown."""
    arguments = {
        "ls": ["ls"],
        "show": ["show", rollout_id],
        "explain": ["explain", rollout_id],
        "sql": ["sql", "SELECT * FROM rollout_overview LIMIT 50"],
        "sql, every call": ["sql", "SELECT rollout_id, sum(length(generation)) FROM entries GROUP BY rollout_id"],
        "report": ["report", rollout_id, "--output", str(output / "rollout.html")],
        "report --all": ["report", "--all", "--output", str(output / "overview.html")],
        "export": ["export", "--output", str(output / "{}.jsonl")],
    }
    tokcap = str(Path(sys.executable).with_name("tokcap"))
    return {name: [tokcap, *given, "--database", str(path)] for name, given in arguments.items()}


def compare(
    path: Path, rollout_id: str, writers: int, seconds: float, repeats: int, *, idle: bool
) -> list[dict[str, Any]]:
    """How long puts took beside each reader, and how long the log got.

    ``idle``: the readers and the neighbour get only the processors that nobody else wants.
    """
    with tempfile.TemporaryDirectory() as output:
        readers = {ALONE: [], NEIGHBOUR: _child("spin"), **commands(path, rollout_id, Path(output))}
        processes = [subprocess.Popen(_child("write", path), stdout=subprocess.PIPE) for _ in range(writers)]
        try:
            for process in processes:
                assert process.stdout is not None
                process.stdout.readline()  # it has begun
            periods = [
                (name, _period(path, command, seconds, idle))
                for repeat in range(repeats)
                for name, command in itertools.islice(itertools.cycle(readers.items()), repeat, repeat + len(readers))
            ]
        finally:
            puts = [put for process in processes for put in _puts_of(process)]
    return _rows(list(readers), periods, sorted(puts))


def _period(path: Path, command: list[str], seconds: float, idle: bool) -> dict[str, Any]:
    """Run the command again and again for so long; what happened meanwhile."""
    rounds, log = 0, 0
    begun = time.monotonic()
    until = begun + seconds
    while time.monotonic() < until:
        with _running(command, rounds, idle) as process:
            while time.monotonic() < until and (process is None or process.poll() is None):
                log = max(log, _size(f"{path}-wal"))
                time.sleep(0.02)
            rounds += process is not None and process.poll() == 0
    time.sleep(_SETTLING_SECONDS)
    return {"begun": begun, "ended": until, "rounds": rounds, "log": log}


@contextlib.contextmanager
def _running(command: list[str], number: int, idle: bool) -> Iterator[subprocess.Popen[bytes] | None]:
    if not command:
        yield None
        return
    words = [word.format(number) if word.endswith("{}.jsonl") else word for word in command]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if idle:
        os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _puts_of(process: subprocess.Popen[bytes]) -> Puts:
    process.terminate()
    assert process.stdout is not None
    puts: Puts = json.loads(process.stdout.read() or b"[]")
    return puts


def _rows(names: list[str], periods: list[tuple[str, dict[str, Any]]], puts: Puts) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for name in names:
        own = [period for of, period in periods if of == name]
        waits = [sorted(took for at, took in puts if one["begun"] < at <= one["ended"]) for one in own]
        rows[name] = {
            "beside": name,
            "puts": sum(map(len, waits)),
            "p50_ms": statistics.median(took[len(took) // 2] for took in waits),
            "p99_ms": statistics.median(took[len(took) * 99 // 100] for took in waits),
            "longest_ms": statistics.median(took[-1] for took in waits),
            "log_mb": max(one["log"] for one in own) / 1e6,
            "rounds": sum(one["rounds"] for one in own),
        }
    for row in rows.values():
        for key, other in itertools.product(_TIMES, (ALONE, NEIGHBOUR)):
            row[f"{key}_to_{other.rpartition(' ')[2]}"] = row[f"{key}_ms"] / rows[other][f"{key}_ms"]
    return list(rows.values())


def show(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The rows for people."""
    yield "puts beside each reader, in milliseconds, and as ratios to those beside nobody and the busy neighbour"
    yield f"{'':20}{'p50':>22}{'p99':>22}{'longest':>22}{'log':>9}{'puts':>8}{'rounds':>8}"
    for row in rows:
        times = "".join(
            f"{row[f'{key}_ms']:10.1f}{row[f'{key}_to_nobody']:6.2f}{row[f'{key}_to_neighbour']:6.2f}" for key in _TIMES
        )
        yield f"{row['beside']:20}{times}{row['log_mb']:6.0f} MB{row['puts']:8,}{row['rounds']:8,}"


def _child(job: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", "scale.contention", job, *map(str, arguments)]


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


async def write(path: Path) -> Puts:
    """Sixteen rollouts at a time, each one call after the other, until somebody ends the process."""
    puts: Puts = []

    async def one_rollout(store: TokenCaptureStore) -> None:
        while True:
            rollout_id, history = f"written-{uuid.uuid4().hex}", list(_PROMPT)
            for call in range(5):
                entry = TokenEntry(
                    rollout_id=rollout_id,
                    model_call_id=f"{call}",
                    prompt_token_ids=history,
                    generation_token_ids=_GENERATION,
                    generation_log_probs=[-0.5] * len(_GENERATION),
                )
                started = time.monotonic()
                await store.put(entry)
                ended = time.monotonic()
                puts.append((ended, (ended - started) * 1000))
                history = [*history, *_GENERATION]
                await asyncio.sleep(random.uniform(0, 2 * _THINKING_SECONDS))

    async with TokenCaptureStore(path) as store:
        ended = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
        print("begun", flush=True)
        rollouts = [asyncio.create_task(one_rollout(store)) for _ in range(16)]
        await ended.wait()
        for rollout in rollouts:
            rollout.cancel()
        await asyncio.gather(*rollouts, return_exceptions=True)
    return puts


def main() -> None:
    """A child of ``compare``: ``write DATABASE``, or ``spin``."""
    warnings.simplefilter("ignore")
    if sys.argv[1] == "write":
        print(json.dumps(asyncio.run(write(Path(sys.argv[2])))))
    while sys.argv[1] == "spin":
        sum(range(1_000_000))


if __name__ == "__main__":
    main()
