"""A process may fork with an open store, and both may go on with it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from support.children import Start, until
from support.programs import said
from token_id_capture.store import TokenCaptureStore


async def _stored(database: Path, rollout_id: str) -> set[str]:
    async with TokenCaptureStore(database) as store:
        return {stored.model_call_id for stored in await store.read_entries(rollout_id)}


async def test_nothing_that_a_forked_child_stored_is_lost_when_its_parent_closes(
    start: Start, database: Path, tmp_path: Path
) -> None:
    start("fork_and_close", database, tmp_path / "acknowledged").succeed()
    acknowledged = said(tmp_path / "acknowledged")
    calls = {line.removeprefix("put ") for line in acknowledged if line != "closed"}
    assert calls == {"parent", "parent again", "child", "child again"}
    assert await _stored(database, "shared") == calls


async def test_forks_at_any_moment_of_a_busy_store_work_in_parent_and_children(
    start: Start, database: Path, tmp_path: Path
) -> None:
    start("fork_under_load", database, tmp_path / "acknowledged", 40).succeed()
    lines = [line.split() for line in said(tmp_path / "acknowledged")]
    assert await _stored(database, "children") == {str(number) for number in range(40)}
    assert {call for rollout, call in lines if rollout == "parent"} <= await _stored(database, "parent")


def test_a_forked_child_keeps_neither_the_writer_lock_nor_the_database_of_its_parent(
    start: Start, database: Path, tmp_path: Path
) -> None:
    parent = start("fork_and_wait", database, tmp_path / "acknowledged")
    (line,) = until(lambda: said(tmp_path / "acknowledged"), "the fork")
    try:
        names = [os.readlink(link) for link in Path(f"/proc/{line}/fd").iterdir()]
        assert [name for name in names if name.startswith(str(database))] == []
    finally:
        os.kill(int(line), signal.SIGKILL)
        parent.kill()


async def test_a_child_that_was_forked_during_a_read_is_told_why_it_cannot_use_the_database(
    start: Start, database: Path, tmp_path: Path
) -> None:
    start("fork_while_reading", database, tmp_path / "acknowledged").succeed()
    refusal, end = said(tmp_path / "acknowledged")
    assert refusal.startswith("StoreError: ")
    assert "fork" in refusal
    assert end == "closed"
    assert await _stored(database, "shared") == {"a", "c"}
