"""The connections on which a store reads tokens."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import pytest

from support.captured import put_chain
from token_id_capture.protocols import TokenCaptureSnapshot
from token_id_capture.store import TokenCaptureStore
from token_id_capture.store.driver import Execute
from token_id_capture.store.read.token_connections import TokenReader
from token_id_capture.store.read.tokens import read_snapshot

_Found = TypeVar("_Found")
_Given = TypeVarTuple("_Given")


@pytest.fixture
async def path(tmp_path: Path) -> Path:
    async with TokenCaptureStore(tmp_path) as store:
        return store.database


def open_connections(path: Path) -> int:
    descriptors = Path("/proc/self/fd")
    names = [os.readlink(link) for link in descriptors.iterdir() if os.path.lexists(link)]
    return names.count(str(path))


def state_seen(execute: Execute) -> int:
    found: int = execute("SELECT count(*) FROM late_writes", {}).fetchone()[0]
    return found


async def test_reads_at_once_share_no_connection_and_one_is_kept_for_the_next(path: Path) -> None:
    reader = TokenReader(path)
    with reader.connection() as first, reader.connection() as second:
        assert first is not second
    with reader.connection() as third:
        assert third in (first, second)
    reader.close()
    assert open_connections(path) == 0


async def test_a_database_that_takes_the_place_of_another_is_the_one_that_is_read(path: Path) -> None:
    reader = TokenReader(path)
    assert reader.read(state_seen) == 0
    for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
        path.with_name(name).unlink(missing_ok=True)
    async with TokenCaptureStore(path) as other:
        await other.open()
        with sqlite3.connect(path) as connection:
            connection.execute("INSERT INTO late_writes VALUES ('rollout', 'call', 'frozen', x'00', 'writer', 0.0)")
        connection.close()
    assert reader.read(state_seen) == 1
    reader.close()
    assert open_connections(path) == 0


async def test_a_read_that_outlasts_the_reader_ends_well_and_leaves_nothing_open(path: Path) -> None:
    reader = TokenReader(path)

    def close_meanwhile(execute: Execute) -> int:
        reader.close()
        return state_seen(execute)

    assert reader.read(close_meanwhile) == 0
    assert open_connections(path) == 0


async def test_all_statements_of_a_read_see_one_state(path: Path) -> None:
    reader = TokenReader(path)

    def write_meanwhile(execute: Execute) -> tuple[int, int]:
        before = state_seen(execute)
        writer = sqlite3.connect(path, isolation_level=None)
        writer.execute("INSERT INTO late_writes VALUES ('rollout', 'call', 'frozen', x'00', 'writer', 0.0)")
        writer.close()
        return before, state_seen(execute)

    assert reader.read(write_meanwhile) == (0, 0)
    assert reader.read(state_seen) == 1
    reader.close()


async def test_a_read_that_fails_gives_its_connection_back(path: Path) -> None:
    reader = TokenReader(path)

    def fail(execute: Execute) -> None:
        execute("SELECT * FROM nowhere", {})

    with pytest.raises(sqlite3.OperationalError, match="nowhere"):
        reader.read(fail)
    assert reader.read(state_seen) == 0
    reader.close()
    assert open_connections(path) == 0


async def test_a_fork_finds_no_connection_open_and_is_told_of_one_in_use(path: Path) -> None:
    reader = TokenReader(path)
    assert reader.read(state_seen) == 0
    assert reader.close_for_fork()
    assert open_connections(path) == 0
    reader.go_on_after_fork()

    def fork_meanwhile(execute: Execute) -> bool:
        closed = reader.close_for_fork()
        reader.go_on_after_fork()
        return closed

    assert not reader.read(fork_meanwhile)
    reader.close()


class DroppedAfterEachRead(TokenReader):
    """A reader after whose every read somebody else retires the snapshot."""

    def __init__(self, path: Path, snapshot: TokenCaptureSnapshot) -> None:
        super().__init__(path)
        self.snapshot = snapshot

    def read(self, query: Callable[[Execute, *_Given], _Found], *given: *_Given) -> _Found:
        found = super().read(query, *given)
        asyncio.run(self._drop())
        return found

    async def _drop(self) -> None:
        async with TokenCaptureStore(self.path) as store:
            frozen = self.snapshot
            assert await store.drop(frozen.rollout_id, snapshot_id=frozen.snapshot_id, version=frozen.version)


def test_a_snapshot_that_is_retired_while_it_is_read_never_looks_complete(tmp_path: Path) -> None:
    async def freeze() -> TokenCaptureSnapshot:
        async with TokenCaptureStore(tmp_path / "captures.db") as store:
            await put_chain(store, "r")
            await store.mark_incomplete("r", "lost", "call_lost")
            return await store.freeze("r")

    frozen = asyncio.run(freeze())
    reader = DroppedAfterEachRead(tmp_path / "captures.db", frozen)
    assert read_snapshot(reader, "r", frozen.snapshot_id, frozen.version) == frozen
    reader.close()
