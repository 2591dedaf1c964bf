"""Several processes disagree about one rollout: the database decides once, and keeps the evidence."""

from __future__ import annotations

import signal
import socket
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from support.children import Puppet, Start
from token_id_capture.store import TokenCaptureStore

MakePuppet = Callable[[str], Puppet]


@pytest.fixture
def puppet(start: Start, database: Path) -> MakePuppet:
    return lambda name: Puppet(start, database, name)


async def test_a_late_call_of_another_process_changes_nothing_and_the_drop_works_once(
    puppet: MakePuppet, database: Path
) -> None:
    server, consumer = puppet("server"), puppet("consumer")
    assert server.do("put", "first", ["a", "b"], 4) == ["", ""]
    snapshot = consumer.do("freeze", "first")
    (late,) = server.do("put", "first", ["late"], 4)
    assert late.startswith("RolloutFrozenError")
    assert consumer.do("freeze", "first") == snapshot
    assert snapshot[3] == ["a", "b"]
    assert consumer.do("drop", "first", *snapshot[:2]) is True
    assert consumer.do("drop", "first", *snapshot[:2]) is True
    (later,) = server.do("put", "first", ["later"], 4)
    assert later.startswith("RolloutRetiredError")
    async with TokenCaptureStore(database) as store:
        detail = await store.describe_rollout("first")
    assert (detail.summary.state, detail.calls) == ("retired", ())
    assert [(write.model_call_id, write.state) for write in detail.late_writes] == [
        ("late", "frozen"),
        ("later", "retired"),
    ]


async def test_a_second_attempt_never_holds_a_call_of_the_first(puppet: MakePuppet, database: Path) -> None:
    first, second = puppet("first"), puppet("second")
    assert first.do("begin_call", "again", "of the first") == ""
    async with TokenCaptureStore(database) as store:
        assert (await store.delete(["again"]))["removed"] == ["again"]
    assert second.do("begin_call", "again", "of the second") == ""
    (refusal,) = first.do("put", "again", ["of the first"], 4)
    assert refusal.startswith("RolloutRetiredError")
    assert second.do("put", "again", ["of the second"], 4) == [""]
    *_, incomplete, calls = second.do("freeze", "again")
    assert (incomplete, calls) == (False, ["of the second"])


async def test_a_killed_process_leaves_an_open_call_that_names_it(puppet: MakePuppet, database: Path) -> None:
    victim = puppet("victim")
    assert victim.do("put", "first", ["a"], 4) == [""]
    assert victim.do("begin_call", "first", "lost") == ""
    victim.kill()
    assert victim.child.exit_code == -signal.SIGKILL
    async with TokenCaptureStore(database) as store:
        snapshot = await store.freeze("first")
    assert snapshot.incomplete
    assert [entry.model_call_id for entry in snapshot.entries] == ["a"]
    with closing(sqlite3.connect(database)) as connection:
        lost = connection.execute("SELECT rollout_id, model_call_id, pid, host FROM lost_calls").fetchall()
        reasons = connection.execute("SELECT model_call_id, reason, detail FROM snapshot_flags").fetchall()
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert lost == [("first", "lost", victim.child.pid, socket.gethostname())]
    assert reasons == [("lost", "call_lost", f"begun by process {victim.child.pid} on {socket.gethostname()}")]


async def test_a_refused_call_does_not_mask_and_a_failed_one_does_with_its_reason(
    puppet: MakePuppet, database: Path
) -> None:
    server = puppet("server")
    for rollout_id in ("refused", "failed"):
        assert server.do("begin_call", rollout_id, "a") == ""
    assert server.do("refuse_call", "refused", "a", "400: too long") == ""
    assert server.do("mark_incomplete", "failed", "a", "unknown_outcome: 500") == ""
    assert server.do("freeze", "refused")[2] is False
    assert server.do("freeze", "failed")[2] is True
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute(
            "SELECT s.rollout_id, f.reason, f.detail FROM snapshot_flags AS f "
            "JOIN snapshots AS s USING (snapshot_id, version) ORDER BY snapshot_flag_id"
        ).fetchall()
    assert ("failed", "unknown_outcome", "500") in rows
    assert {row[0] for row in rows} == {"failed"}


async def test_a_mark_after_the_freeze_defeats_the_drop_of_the_older_version(
    puppet: MakePuppet, database: Path
) -> None:
    server, consumer = puppet("server"), puppet("consumer")
    assert server.do("put", "first", ["a"], 4) == [""]
    snapshot_id, version, incomplete, _ = consumer.do("freeze", "first")
    assert not incomplete
    assert server.do("mark_incomplete", "first", "a", "lost_stream") == ""
    assert consumer.do("drop", "first", snapshot_id, version) is False
    again = consumer.do("freeze", "first")
    assert again == [snapshot_id, version + 1, True, ["a"]]
    async with TokenCaptureStore(database) as store:
        assert [call.model_call_id for call in await store.read_entries("first")] == ["a"]
    assert consumer.do("drop", "first", *again[:2]) is True


async def test_consumers_that_drop_one_snapshot_at_once_delete_it_once(puppet: MakePuppet, database: Path) -> None:
    consumers = [puppet(f"consumer{number}") for number in range(3)]
    rollouts = [f"rollout{number}" for number in range(20)]
    for rollout_id in rollouts:
        assert consumers[0].do("put", rollout_id, ["a"], 4) == [""]
    with closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.executescript(
            "CREATE TABLE deletions (snapshot_id TEXT);"
            "CREATE TRIGGER count_deletions AFTER DELETE ON snapshots "
            "BEGIN INSERT INTO deletions VALUES (OLD.snapshot_id); END"
        )
    for rollout_id in rollouts:
        snapshot = consumers[0].do("freeze", rollout_id)
        for consumer in consumers:
            consumer.send("drop", rollout_id, *snapshot[:2])
        assert [consumer.answer() for consumer in consumers] == [True] * 3
        assert consumers[1].do("drop", rollout_id, snapshot[0], snapshot[1] + 1) is False
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT count(*), count(DISTINCT snapshot_id) FROM deletions").fetchone() == (20, 20)
        assert connection.execute("SELECT count(*) FROM entries").fetchone() == (0,)
