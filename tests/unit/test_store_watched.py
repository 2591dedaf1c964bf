"""What a server asks its store while it serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from token_id_capture.errors import StorageFullError, StoreClosedError
from token_id_capture.store import TokenCaptureStore


async def test_a_store_that_can_be_written_says_so_by_writing(tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        before = store.wal_bytes()
        await store.check_writable()
        assert store.wal_bytes() > before
        assert store.waiting() == (0, 0)


async def test_a_disk_on_which_a_put_would_be_refused_is_not_writable(tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path / "captures.db", free_space_floor=2**62) as store:
        with pytest.raises(StorageFullError, match="fewer than the floor"):
            await store.check_writable()


async def test_a_closed_store_is_not_writable_and_nothing_waits_in_it(tmp_path: Path) -> None:
    store = TokenCaptureStore(tmp_path / "captures.db")
    assert store.waiting() == (0, 0)
    await store.close()
    with pytest.raises(StoreClosedError):
        await store.check_writable()
