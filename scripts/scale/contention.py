"""Whether people who look make writers wait.

Several processes write, as servers do whose engines take their time: first alone; then while three
others read without a pause (pages of ``ls`` with filters, the first page of every view, a statement
that reads every call); then while three others keep as busy with nothing. Readers take processors
from writers, as anybody does; what they take beyond that shows in the difference of the last two.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
import uuid
import warnings
from pathlib import Path
from typing import Any, Final

from token_id_capture import TokenCaptureStore, TokenEntry

PERIODS: Final = {"alone": "", "with readers": "read", "with busy neighbours": "spin"}
_THINKING_SECONDS: Final = 0.4
_PROMPT: Final = list(range(2_000))
_GENERATION: Final = list(range(200))


def compare(path: Path, writers: int, seconds: float) -> dict[str, dict[str, Any]]:
    """Latencies of ``put`` over all writers, and how long the log got, for each period."""
    results = {}
    for period, job in PERIODS.items():
        readers = [_start(job, path, str(kind)) for kind in range(3)] if job else []
        processes = [_start("write", path, str(seconds)) for _ in range(writers)]
        longest_log, waits = 0, []
        while any(process.poll() is None for process in processes):
            longest_log = max(longest_log, _size(f"{path}-wal"))
            time.sleep(0.05)
        for process in processes:
            assert process.stdout is not None
            waits += json.loads(process.stdout.read())
        rounds = 0
        for reader in readers:
            reader.terminate()
            rounds += len((reader.communicate()[0] or "").splitlines())
        waits.sort()
        results[period] = {
            "puts": len(waits),
            "median": f"{waits[len(waits) // 2]:.1f} ms",
            "p99": f"{waits[len(waits) * 99 // 100]:.1f} ms",
            "longest": f"{waits[-1]:.1f} ms",
            "log": f"{longest_log / 1e6:.0f} MB",
            "reads": rounds,
        }
    return results


def _start(job: str, path: Path, argument: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "scale.contention", job, str(path), argument]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


async def write(path: Path, seconds: float) -> list[float]:
    """Sixteen rollouts at a time, each one call after the other; returns how long each put took, in milliseconds."""
    waits: list[float] = []
    async with TokenCaptureStore(path) as store:
        until = time.monotonic() + seconds

        async def one_rollout() -> None:
            while time.monotonic() < until:
                rollout_id, history = f"written-{uuid.uuid4().hex}", list(_PROMPT)
                for call in range(5):
                    entry = TokenEntry(
                        rollout_id=rollout_id,
                        model_call_id=f"{call}",
                        prompt_token_ids=history,
                        generation_token_ids=_GENERATION,
                        generation_log_probs=[-0.5] * len(_GENERATION),
                    )
                    started = time.perf_counter()
                    await store.put(entry)
                    waits.append((time.perf_counter() - started) * 1000)
                    history = [*history, *_GENERATION]
                    await asyncio.sleep(random.uniform(0, 2 * _THINKING_SECONDS))

        await asyncio.gather(*(one_rollout() for _ in range(16)))
    return waits


def read(path: Path, kind: int) -> None:
    """Go round until somebody ends the process; a line for each round."""
    from scale.measurement import FILTERS, VIEWS, _list
    from token_id_capture.store.sql_access import sql_reader

    statements = {
        1: [f"SELECT * FROM {view} LIMIT 50" for view in VIEWS],
        2: ["SELECT rollout_id, sum(length(generation)) FROM entries GROUP BY rollout_id"],
    }
    while True:
        for wanted in FILTERS.values() if kind == 0 else ():
            asyncio.run(_list(path, wanted))
        for statement in statements.get(kind, ()):
            with sql_reader(path) as reader, reader.query(statement) as (_, pages):
                for _page in pages:
                    pass
        print("round", flush=True)


def main() -> None:
    """A child of ``compare``: ``write DATABASE SECONDS``, ``read DATABASE KIND`` or ``spin DATABASE KIND``."""
    warnings.simplefilter("ignore")
    job, path, argument = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    if job == "write":
        print(json.dumps(asyncio.run(write(path, float(argument)))))
    elif job == "read":
        read(path, int(argument))
    else:
        while True:
            sum(range(1_000_000))


if __name__ == "__main__":
    main()
