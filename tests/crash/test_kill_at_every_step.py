"""A process is killed before each of its file operations in turn, from the first open to the close."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest

from support import interposer
from support.children import Start
from support.programs import entry, said
from token_id_capture.store import TokenCaptureStore

# TORTURE=1 takes every step. Else these: of the creation, which is the slow one, some at which
# SQLite's rollback journal is left behind and some later ones; of what follows, every fifth.
EVERY_STEP = bool(os.environ.get("TORTURE"))
CREATION_STEPS = count(1) if EVERY_STEP else (1, 6, 15, 25, 39, 80, 10_000)
LIFECYCLE_STEPS = count(1, 1 if EVERY_STEP else 8)

KilledAt = Callable[[int, str], bool]


@pytest.fixture
def killed_at(start: Start, control: interposer.Control, database: Path, tmp_path: Path) -> KilledAt:
    """Run a program until a step, before which it is killed; False if it ended by itself before."""

    def run(step: int, program: str) -> bool:
        control.reset()
        control.kill_at = step
        child = start(program, database, tmp_path / f"{program}{step}.acknowledged", control=control.path)
        code = child.wait()
        assert code in (0, -signal.SIGKILL), child.text()
        return code != 0

    return run


async def test_a_kill_at_any_step_of_the_creation_leaves_a_path_that_can_be_used(
    killed_at: KilledAt, database: Path
) -> None:
    for step in CREATION_STEPS:
        _empty(database.parent)
        if not killed_at(step, "create"):
            break
        async with TokenCaptureStore(database) as store:
            await store.put(entry("first", "a"))
            assert await store.read_entries("first") == (entry("first", "a"),)
        _assert_sound(database)
    assert step > 120


async def test_a_read_finishes_what_a_kill_in_the_creation_cut_short(killed_at: KilledAt, database: Path) -> None:
    assert killed_at(15, "create")
    assert database.with_name("captures.db-journal").exists()
    store = TokenCaptureStore(database)
    assert await store.list_rollouts() == []
    await store.close()


async def test_a_kill_at_any_step_loses_nothing_acknowledged(
    killed_at: KilledAt, database: Path, tmp_path: Path
) -> None:
    assert not killed_at(0, "create")
    shutil.copy(database, tmp_path / "fresh.db")
    for step in LIFECYCLE_STEPS:
        _empty(database.parent)
        shutil.copy(tmp_path / "fresh.db", database)
        killed = killed_at(step, "lifecycle")
        lines = said(tmp_path / f"lifecycle{step}.acknowledged")
        await asyncio.wait_for(_assert_all_there(database, lines), 20)
        _assert_sound(database)
        if not killed:
            assert lines[-1] == "close"
            break
    assert step > 100


def _empty(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()


async def _assert_all_there(database: Path, lines: list[str]) -> None:
    """Open as the next process does, and compare with what had been acknowledged."""
    async with TokenCaptureStore(database) as store:
        states = {rollout.rollout_id: rollout.state for rollout in await store.list_rollouts()}
        if "drop first" in lines:
            assert states["first"] == "retired"
        elif "freeze first" in lines:
            assert states["first"] in ("frozen", "retired") if "dropping first" in lines else ("frozen",)
        for line in lines:
            kind, *names = line.split()
            if kind == "put" and states[names[0]] != "retired":
                stored = {call.model_call_id: call for call in await store.read_entries(names[0])}
                assert stored[names[1]] == entry(names[0], names[1], tokens=2000 if names[1].startswith("group") else 4)
        if "begin first lost" in lines and states["first"] != "retired":
            intents = (await store.describe_rollout("first")).intents
            assert "lost" in [intent.model_call_id for intent in intents if intent.outcome is None]
            assert (await store.freeze("first")).incomplete
        if "mark second" in lines:
            assert (await store.freeze("second")).incomplete


def _assert_sound(database: Path) -> None:
    half = """
        SELECT * FROM snapshots AS s WHERE entry_count != (
            SELECT count(*) FROM snapshot_entries AS e WHERE e.snapshot_id = s.snapshot_id AND e.version = s.version
        )
    """
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        assert connection.execute(half).fetchall() == []
