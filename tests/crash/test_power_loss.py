"""The power fails at any instant: what was acknowledged is on the disk, however little else is."""

from __future__ import annotations

import os
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from support import interposer
from support.children import Start
from support.interposer import Operation, read_trace
from support.power import Disk
from support.programs import entry
from token_id_capture.store import TokenCaptureStore

# Of what was not synced, this share came to the disk: none of it, all of it, or some.
SHARES = (0.0, 0.5, 0.9, 1.0)
INSTANTS = 10_000 if os.environ.get("TORTURE") else 40


FULL, NORMAL = 2, 1


@pytest.fixture
def trace(start: Start, control: interposer.Control, database: Path, tmp_path: Path) -> Callable[[int], Path]:
    """Run ``busy_life`` with a level of PRAGMA synchronous; the trace of what it did."""

    def run(synchronous: int) -> Path:
        path = tmp_path / "trace"
        acknowledged = tmp_path / "life.acknowledged"
        start("busy_life", database, acknowledged, synchronous, control=control.path, trace=path).succeed()
        return path

    return run


async def test_what_was_acknowledged_survives_a_loss_of_power_at_any_instant(
    trace: Callable[[int], Path], tmp_path: Path
) -> None:
    assert await _lose_power(trace(FULL), tmp_path) == "closed"


async def test_a_store_that_does_not_sync_each_commit_would_be_found_out(
    trace: Callable[[int], Path], tmp_path: Path
) -> None:
    with pytest.raises((LostError, sqlite3.OperationalError)):
        await _lose_power(trace(NORMAL), tmp_path)


async def _lose_power(trace: Path, tmp_path: Path) -> str:
    """Lose power at many instants of the trace, in several ways each; the last line acknowledged."""
    operations = list(read_trace(trace))
    dice = random.Random(11)
    instants = set(dice.sample(range(len(operations)), min(INSTANTS, len(operations))))
    disk = Disk()
    acknowledged: list[str] = []
    for number, operation in enumerate(operations):
        disk.apply(operation)
        if operation.kind == "acknowledge":
            acknowledged.append(operation.data.decode().strip())
        for share in SHARES if number in instants else ():
            left = tmp_path / f"{number}-{share}"
            left.mkdir()
            disk.lose_power(left, share, dice)
            await _assert_all_there(left / "captures.db", acknowledged)
    return acknowledged[-1]


class LostError(AssertionError):
    """Something acknowledged is not there."""


async def _assert_all_there(database: Path, acknowledged: list[str]) -> None:
    if not acknowledged:
        # Lost in its creation: the next process makes it.
        async with TokenCaptureStore(database) as store:
            await store.put(entry("first", "a"))
        return
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        stored = {
            (row[0], row[1]): row[2:]
            for row in connection.execute("SELECT rollout_id, model_call_id, generation, log_probs FROM entries")
        }
        states = dict(connection.execute("SELECT rollout_id, state FROM rollouts").fetchall())
        flags = {row[0] for row in connection.execute("SELECT detail FROM incomplete_flags")}
    for line in acknowledged:
        kind, *names = line.split()
        dropped = names and f"dropping {names[0]}" in acknowledged
        if kind == "put" and not dropped:
            whole = entry(names[0], names[1], 200)
            tokens = whole.generation_token_ids.tobytes(), whole.generation_log_probs.tobytes()
            there = stored.get((names[0], names[1])) == tokens
        elif kind == "mark":
            there = dropped or names[1] in flags
        elif kind == "freeze":
            there = states.get(names[0]) in ("frozen", "retired")
        else:
            there = kind != "drop" or states.get(names[0]) == "retired"
        if not there:
            raise LostError(line)


def test_the_model_of_the_disk_forgets_what_was_not_synced(tmp_path: Path) -> None:
    disk, dice = Disk(), random.Random(1)
    for operation in (
        Operation("write", "a.db", 0, b"old"),
        Operation("sync", "a.db", 0, b""),
        Operation("sync", "", 0, b""),
        Operation("write", "a.db", 0, b"new"),
        Operation("write", "b.db", 0, b"unnamed"),
        Operation("sync", "b.db", 0, b""),
    ):
        disk.apply(operation)
    for share, expected in ((0.0, {"a.db": b"old"}), (1.0, {"a.db": b"new", "b.db": b"unnamed"})):
        left = tmp_path / str(share)
        left.mkdir()
        disk.lose_power(left, share, dice)
        assert {path.name: path.read_bytes() for path in left.iterdir()} == expected
