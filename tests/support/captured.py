"""Databases for the tests of the housekeeping commands, and processes that write them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore

LIMIT_SECONDS = 60.0


def entry(rollout_id: str, call: str, prompt: list[int], generation: list[int], **more: Any) -> TokenEntry:
    return TokenEntry(
        rollout_id=rollout_id,
        model_call_id=call,
        prompt_token_ids=prompt,
        generation_token_ids=generation,
        generation_log_probs=[-0.25 * (n % 7 + 1) for n in range(len(generation))],
        output_items=[{"type": "message", "content": f"answer of {call} in {rollout_id}"}],
        **more,
    )


async def put_chain(store: TokenCaptureStore, rollout_id: str, turns: int = 3, width: int = 4) -> None:
    """Calls ``c0``, ``c1``, ...; each prompt continues the call before it."""
    prompt = list(range(width))
    for turn in range(turns):
        generation = [1000 * (turn + 1) + n for n in range(width)]
        await store.put(entry(rollout_id, f"c{turn}", prompt, generation))
        prompt = [*prompt, *generation, 7]


async def finish(store: TokenCaptureStore, rollout_id: str, outcome: str, reason: str = "") -> None:
    snapshot = await store.freeze(rollout_id)
    await store.record_outcome(snapshot.snapshot_id, snapshot.version, outcome, reason)


def filled(path: Path, fill: Callable[[TokenCaptureStore], Coroutine[Any, Any, None]]) -> Path:
    """A closed database that ``fill`` wrote."""

    async def make() -> Path:
        async with TokenCaptureStore(path) as store:
            await fill(store)
            return store.database

    return asyncio.run(make())


def sql(path: Path, *statements: str) -> list[tuple[Any, ...]]:
    """Run statements in the stock driver, as another program would; the rows of the last one."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        return [connection.execute(statement).fetchall() for statement in statements][-1]


WAITS_FOR_EVER = "await asyncio.Event().wait()"


@contextlib.contextmanager
def process(path: Path, body: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that opened a store, ran ``body`` (lines of an async function) up to ``ready()``, and goes on.

    It is killed at the end of the block if it still runs.
    """
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    program = (
        f"import asyncio, sys\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from support.captured import *\n"
        "def ready(): print('ready', flush=True)\n"
        f"async def main():\n    store = TokenCaptureStore(sys.argv[1])\n{lines}\n"
        "asyncio.run(main())\n"
    )
    with tempfile.TemporaryFile() as errors:
        writer = subprocess.Popen(
            [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, stderr=errors, bufsize=0
        )
        try:
            assert writer.stdout is not None
            if writer.stdout.readline() != b"ready\n":
                errors.seek(0)
                raise AssertionError(errors.read().decode())
            yield writer
        finally:
            writer.kill()
            writer.wait(LIMIT_SECONDS)
            if writer.stdout is not None:
                writer.stdout.close()


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for something true, and return it."""
    end = time.monotonic() + LIMIT_SECONDS
    while not (value := condition()):
        assert time.monotonic() < end, f"waited in vain: {what}"
        time.sleep(0.01)
    return value


def one_line(text: str) -> str:
    """The text, which must be a single line."""
    lines = text.splitlines()
    assert len(lines) == 1, text
    return lines[0]


def content(path: Path) -> bytes:
    """The bytes of a database that no connection of this process has open."""
    return path.read_bytes()


def mode_of(path: Path) -> int:
    return os.stat(path).st_mode & 0o777
