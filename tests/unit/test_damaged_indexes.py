"""A bit that flips in an index hides a row from every statement that comes by it, and no digest is wrong."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from support.call_trees import call
from token_id_capture.errors import CorruptCaptureError
from token_id_capture.store import TokenCaptureStore


def flip_a_bit(database: Path, index: str, key: str = "rollout-1", place: int = 0) -> None:
    """In the last key of the index, ``place`` bytes after its beginning."""
    with contextlib.closing(sqlite3.connect(database)) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (index,)).fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    content = bytearray(database.read_bytes())
    # The cells of a page are filled from its end, so the key that was inserted last comes first.
    content[content.index(key.encode(), (page - 1) * size, page * size) + place] ^= 1
    database.write_bytes(content)


@pytest.mark.parametrize(
    ("index", "place"),
    [
        ("sqlite_autoindex_entries_1", 0),
        # The row number after the key: it leads to another call.
        ("sqlite_autoindex_entries_1", len("rollout-1c2")),
        ("entries_by_length", 0),
        ("incomplete_flags_by_rollout", 0),
        ("sqlite_autoindex_call_intents_1", 0),
    ],
)
async def test_a_rollout_is_not_frozen_while_an_index_hides_a_call_a_flag_or_an_open_intent(
    tmp_path: Path, index: str, place: int
) -> None:
    database = tmp_path / "captures.db"
    async with TokenCaptureStore(database) as store:
        for number in range(3):
            await store.put(call(f"c{number}", [1, 2], [3 + number], rollout_id="rollout-1"))
        await store.mark_incomplete("rollout-1", reason="capture_failed")
        await store.begin_call("rollout-1", "lost")
    flip_a_bit(database, index, place=place)
    async with TokenCaptureStore(database) as store:
        with pytest.raises(CorruptCaptureError, match="'rollout-1' was not frozen: its indexes show"):
            await store.freeze("rollout-1")
    with contextlib.closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT count(*) FROM snapshots").fetchone() == (0,)
        connection.execute("REINDEX")
    async with TokenCaptureStore(database) as store:
        snapshot = await store.freeze("rollout-1")
        assert (len(snapshot.entries), [flag.reason for flag in snapshot.flags]) == (3, ["capture_failed", "call_lost"])


async def test_a_lost_call_masks_its_rollout_though_a_damaged_index_hides_its_process(tmp_path: Path) -> None:
    database = tmp_path / "captures.db"
    async with TokenCaptureStore(database) as store:
        await store.begin_call("rollout-1", "lost")
    with contextlib.closing(sqlite3.connect(database)) as connection:
        (writer,) = connection.execute("SELECT writer_id FROM writers").fetchone()
    flip_a_bit(database, "sqlite_autoindex_writers_1", writer)
    async with TokenCaptureStore(database) as store:
        snapshot = await store.freeze("rollout-1")
    assert [(flag.reason, flag.detail) for flag in snapshot.flags] == [("call_lost", "begun by an unknown process")]
