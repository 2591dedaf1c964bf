"""Processes that end or are killed leave neither lost calls nor locks behind."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

from support.children import Start, until
from support.programs import entry, said
from token_id_capture.store import TokenCaptureStore


async def _stored(database: Path, rollout_id: str) -> set[str]:
    async with TokenCaptureStore(database) as store:
        return {stored.model_call_id for stored in await store.read_entries(rollout_id)}


async def test_a_process_that_forgets_to_close_ends_soon_and_loses_nothing(
    start: Start, database: Path, tmp_path: Path
) -> None:
    child = start("end_without_close", database, tmp_path / "acknowledged")
    until(lambda: "end" in said(tmp_path / "acknowledged"), "the last line of the program")
    began = time.monotonic()
    assert child.wait() == 0, child.text()
    assert time.monotonic() - began < 5
    assert "a" in await _stored(database, "open")


async def test_a_holder_of_the_writer_lock_that_is_killed_frees_it(
    start: Start, database: Path, tmp_path: Path
) -> None:
    start("create", database, tmp_path / "created").succeed()
    holder = start("hold_writer_lock", database, tmp_path / "held")
    until(lambda: said(tmp_path / "held"), "the writer lock to be taken")
    writer = start("put_many", database, tmp_path / "acknowledged", "first", 10)
    # It opens without the writer lock, and cannot write without it.
    until(lambda: _waits_for_a_lock(writer.pid), "the writer to wait at the writer lock")
    assert said(tmp_path / "acknowledged") == []
    holder.kill()
    writer.succeed()
    assert len(await _stored(database, "first")) == 10


def _waits_for_a_lock(pid: int) -> bool:
    return any(
        line.split()[1] == "->" and line.split()[2] == "FLOCK" and line.split()[5] == str(pid)
        for line in Path("/proc/locks").read_text().splitlines()
    )


def test_copies_taken_at_random_instants_hold_all_that_was_acknowledged_before(
    start: Start, database: Path, tmp_path: Path
) -> None:
    """All writers are stopped for the time of the copy, so it is one instant, as a loss of power is."""
    ledgers = [tmp_path / f"{number}.acknowledged" for number in range(3)]
    writers = [
        start("put_many", database, ledger, f"rollout{number}", 100_000, 300) for number, ledger in enumerate(ledgers)
    ]
    until(lambda: all(len(said(ledger)) > 1 for ledger in ledgers), "all to write")
    dice = random.Random(3)
    for number in range(8):
        time.sleep(dice.uniform(0.0, 0.1))
        copy = tmp_path / f"copy{number}.db"
        for writer in writers:
            writer.signal(signal.SIGSTOP)
        until(lambda: all(_is_stopped(writer.pid) for writer in writers), "all to stand still")
        acknowledged = [said(ledger) for ledger in ledgers]
        # No shared memory: it does not outlive the power.
        for suffix in ("", "-wal"):
            shutil.copyfile(f"{database}{suffix}", f"{copy}{suffix}")
        for writer in writers:
            writer.signal(signal.SIGCONT)
        _assert_holds(copy, acknowledged)
    assert min(len(lines) for lines in acknowledged) > 50


def _is_stopped(pid: int) -> bool:
    return all(
        (task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in Path(f"/proc/{pid}/task").iterdir()
    )


def _assert_holds(copy: Path, acknowledged: list[list[str]]) -> None:
    with closing(sqlite3.connect(copy)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        stored = {}
        for rollout_id, call, generation, log_probs in connection.execute(
            "SELECT rollout_id, model_call_id, generation, log_probs FROM entries"
        ):
            stored[rollout_id, call] = generation, log_probs
    whole = entry("any", "call", 300)
    expected = whole.generation_token_ids.tobytes(), whole.generation_log_probs.tobytes()
    assert set(stored.values()) <= {expected}
    for number, lines in enumerate(acknowledged):
        calls = {line.split()[0] for line in lines if line[0].isdigit()}
        assert calls <= {call for rollout_id, call in stored if rollout_id == f"rollout{number}"}
    os.unlink(copy)
