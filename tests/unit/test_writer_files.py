"""Somebody removes or replaces the files while they are open: nothing is acknowledged into a file without a name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from token_id_capture.errors import UnusableDatabaseError
from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore
from token_id_capture.store.file.lock import WriterLock


def entry(model_call_id: str) -> TokenEntry:
    return TokenEntry(
        rollout_id="first",
        model_call_id=model_call_id,
        prompt_token_ids=[1],
        generation_token_ids=[2],
        generation_log_probs=[-0.5],
    )


@pytest.mark.parametrize("removed", [["captures.db"], ["captures.db", "captures.db-wal", "captures.db-shm"]])
async def test_a_removed_database_is_not_written_any_more_and_a_new_one_is_made(
    removed: list[str], tmp_path: Path
) -> None:
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        await store.put(entry("before"))
        for name in removed:
            os.unlink(tmp_path / name)
        with pytest.raises(UnusableDatabaseError, match="removed or replaced"):
            await store.put(entry("during"))
        for name in os.listdir(tmp_path):
            if name != "captures.db.lock":
                os.unlink(tmp_path / name)
        await store.put(entry("after"))
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        assert await store.read_entries("first") == (entry("after"),)


@pytest.mark.parametrize("suffix", ["-wal", "-shm"])
async def test_a_removed_log_or_index_is_noticed_before_the_answer_and_costs_nothing_that_was_stored(
    suffix: str, tmp_path: Path
) -> None:
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        await store.put(entry("before"))
        os.unlink(tmp_path / f"captures.db{suffix}")
        with pytest.raises(UnusableDatabaseError, match="removed or replaced"):
            await store.put(entry("during"))
        await store.put(entry("after"))
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        stored = [call.model_call_id for call in await store.read_entries("first")]
    assert stored[0] == "before"
    assert stored[-1] == "after"


async def test_a_process_with_a_removed_database_leaves_the_new_one_alone(tmp_path: Path) -> None:
    old = TokenCaptureStore(tmp_path / "captures.db")
    await old.put(entry("before"))
    for name in ("captures.db", "captures.db-wal", "captures.db-shm"):
        os.unlink(tmp_path / name)
    async with TokenCaptureStore(tmp_path / "captures.db") as new:
        await new.put(entry("a"))
        await old.close()
        assert (tmp_path / "captures.db-wal").exists()
        await new.put(entry("b"))
        # What a machine without power would keep of it.
        for suffix in ("", "-wal"):
            shutil.copyfile(tmp_path / f"captures.db{suffix}", tmp_path / f"copy.db{suffix}")
    async with TokenCaptureStore(tmp_path / "copy.db") as copy:
        assert [call.model_call_id for call in await copy.read_entries("first")] == ["a", "b"]


def test_a_removed_lock_file_lets_nobody_in_beside_the_one_who_is_there(tmp_path: Path) -> None:
    first, second = WriterLock(tmp_path / "captures.db"), WriterLock(tmp_path / "captures.db")
    with first:
        pass
    os.unlink(tmp_path / "captures.db.lock")
    with second:
        pass
    with first:
        # The same file for both, so that one of them waits.
        assert first._descriptor is not None
        assert second._descriptor is not None
        assert os.path.sameopenfile(first._descriptor, second._descriptor)
    first.close()
    second.close()
