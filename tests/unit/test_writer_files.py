"""Somebody removes or replaces the files while they are open: nothing is acknowledged into a file without a name."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Iterable
from pathlib import Path

import pytest

from token_id_capture.errors import ReplacedDatabaseError, StoreError, UnusableDatabaseError
from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore
from token_id_capture.store.file.lock import WriterLock
from token_id_capture.store.maintain.vacuum import vacuum


def entry(model_call_id: str) -> TokenEntry:
    return TokenEntry(
        rollout_id="first",
        model_call_id=model_call_id,
        prompt_token_ids=[1],
        generation_token_ids=[2],
        generation_log_probs=[-0.5],
    )


ALL = ("captures.db", "captures.db-wal", "captures.db-shm")


def remove(directory: Path, names: Iterable[str] = ALL) -> None:
    for name in names:
        (directory / name).unlink(missing_ok=True)


async def assert_nothing_is_done(store: TokenCaptureStore) -> None:
    """Neither the first time that somebody asks nor later."""
    for _ in range(2):
        for ask in (
            store.begin_call("first", "during"),
            store.put(entry("during")),
            store.freeze("first"),
            store.check_writable(),
            store.list_rollouts(),
            store.read_entries("first"),
        ):
            with pytest.raises(ReplacedDatabaseError, match="removed or replaced"):
                await ask


@pytest.mark.parametrize("removed", [["captures.db"], ALL])
async def test_a_store_makes_no_new_file_in_place_of_one_that_was_removed(removed: list[str], tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        await store.put(entry("before"))
        remove(tmp_path, removed)
        await assert_nothing_is_done(store)
        remove(tmp_path)
        await assert_nothing_is_done(store)
        assert not store.database.exists()
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        await store.put(entry("after"))
        assert await store.read_entries("first") == (entry("after"),)


async def test_a_store_goes_on_neither_with_an_older_copy_nor_with_a_backup_of_its_file(tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        await store.put(entry("before"))
    shutil.copyfile(tmp_path / "captures.db", tmp_path / "copy.db")
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        await store.put(entry("later"))
        remove(tmp_path)
        shutil.copyfile(tmp_path / "copy.db", tmp_path / "captures.db")
        await assert_nothing_is_done(store)


async def test_a_file_whose_directory_was_renamed_is_not_made_anew(tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path / "run" / "captures.db") as store:
        await store.put(entry("before"))
        (tmp_path / "run").rename(tmp_path / "moved")
        await assert_nothing_is_done(store)
        assert not (tmp_path / "run").exists()


async def test_another_file_is_noticed_also_where_no_connection_is_open(tmp_path: Path) -> None:
    reader = TokenCaptureStore(tmp_path / "captures.db")
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        await store.put(entry("before"))
        assert [rollout.rollout_id for rollout in await reader.list_rollouts()] == ["first"]
    # Whoever comes first makes it anew, under the same name and maybe with the same inode.
    remove(tmp_path)
    async with TokenCaptureStore(tmp_path / "captures.db"):
        await assert_nothing_is_done(reader)
    await reader.close()


async def test_a_store_that_is_to_go_on_with_the_file_of_another_process_takes_no_other(tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path / "captures.db") as first:
        await first.put(entry("before"))
    file_id = first.file_id
    async with TokenCaptureStore(tmp_path / "captures.db", file_id=file_id) as same:
        await same.put(entry("later"))
    remove(tmp_path)
    missing = TokenCaptureStore(tmp_path / "captures.db", file_id=file_id)
    await assert_nothing_is_done(missing)
    assert not missing.database.exists()
    async with TokenCaptureStore(tmp_path / "captures.db") as another:
        assert another.file_id != file_id
    other = TokenCaptureStore(tmp_path / "captures.db", file_id=file_id)
    await assert_nothing_is_done(other)
    await missing.close()
    await other.close()


async def test_a_link_to_a_database_works_as_the_database_does(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link.db").symlink_to(tmp_path / "disk" / "captures.db")
    async with TokenCaptureStore(tmp_path / "link.db") as store:
        await store.put(entry("a"))
        assert store.database == tmp_path / "disk" / "captures.db"
    async with TokenCaptureStore(tmp_path / "disk" / "captures.db") as store:
        assert await store.read_entries("first") == (entry("a"),)
    assert set(os.listdir(tmp_path)) == {"disk", "link.db"}


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


async def many_calls(store: TokenCaptureStore) -> None:
    for number in range(40):
        await store.put(entry(f"before{number}"))


@pytest.mark.parametrize("kept", [0, 4096, 3 * 4096])
@pytest.mark.parametrize("suffix", ["", "-wal"])
async def test_a_file_that_another_program_cuts_short_is_noticed_before_the_next_answer(
    suffix: str, kept: int, tmp_path: Path
) -> None:
    async with TokenCaptureStore(tmp_path / "captures.db") as store, TokenCaptureStore(store.database) as other:
        await many_calls(store)
        await other.put(entry("of another"))
        await many_calls(store)
        os.truncate(f"{store.database}{suffix}", kept)
        for _ in range(2):
            with pytest.raises(ReplacedDatabaseError, match="cut short"):
                await other.put(entry("during"))
        # The log may have held all that was cut off, and the other's end has brought it back then.
        with contextlib.suppress(StoreError):
            await store.put(entry("during"))
            assert len(await store.read_entries("first")) == 42


async def test_a_log_whose_end_went_with_the_power_leaves_what_is_before_it(tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        await many_calls(store)
        # The machine comes back with all but the end of the log, which nobody was told to be on the disk.
        for suffix in ("", "-wal", ".lock"):
            shutil.copyfile(f"{store.database}{suffix}", tmp_path / f"copy.db{suffix}")
    log = tmp_path / "copy.db-wal"
    os.truncate(log, log.stat().st_size * 3 // 4)
    async with TokenCaptureStore(tmp_path / "copy.db") as copy:
        await copy.put(entry("after"))
        calls = [call.model_call_id for call in await copy.read_entries("first")]
        assert calls == [*(f"before{number}" for number in range(len(calls) - 1)), "after"]
        assert 20 < len(calls) < 40


async def test_files_that_become_smaller_for_a_good_reason_are_gone_on_with(tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        await many_calls(store)
        # A checkpoint of another program, of which no process of this package knows.
        with contextlib.closing(sqlite3.connect(store.database)) as connection:
            assert connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
        await store.put(entry("after"))
        await store.delete(["first"])
        await store.put(entry("again"))
        vacuum(store.database)
        await store.put(entry("last"))
        assert [call.model_call_id for call in await store.read_entries("first")] == ["again", "last"]
