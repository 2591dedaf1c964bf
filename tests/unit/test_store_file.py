"""The file behind a store: where it lies, who may read it, what happens when it is full."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import pytest

from support.opened import call, change, rows
from token_id_capture.errors import (
    InvalidEntryError,
    NewerSchemaError,
    StorageFullError,
    StoreClosedError,
    UnusableDatabaseError,
)
from token_id_capture.store import TokenCaptureStore
from token_id_capture.store.file.location import database_path


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[TokenCaptureStore]:
    async with TokenCaptureStore(tmp_path / "captures.db") as opened:
        yield opened


async def outcome_of(work: Awaitable[Any]) -> type[BaseException] | None:
    results: tuple[Any] = await asyncio.gather(work, return_exceptions=True)
    result = results[0]
    return None if result is None else type(result)


async def test_the_database_and_its_lock_are_for_the_owner_only(store: TokenCaptureStore) -> None:
    for path in (store.database, Path(f"{store.database}-wal"), Path(f"{store.database}.lock")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_directory_means_the_file_in_it_and_a_url_means_its_file(tmp_path: Path) -> None:
    assert TokenCaptureStore(tmp_path).database == tmp_path / "token_captures.db"
    assert TokenCaptureStore(tmp_path / "runs").database == tmp_path / "runs" / "token_captures.db"
    assert TokenCaptureStore(tmp_path / "one.db").database == tmp_path / "one.db"
    assert TokenCaptureStore(f"sqlite:///{tmp_path}/one.db").database == tmp_path / "one.db"
    assert TokenCaptureStore(f"sqlite+aiosqlite:///{tmp_path}/a%20b.db").database == tmp_path / "a b.db"
    for url in ("mysql://host/db", "sqlite://", "sqlite:///:memory:"):
        with pytest.raises(UnusableDatabaseError, match="name a path, or an SQLite URL"):
            TokenCaptureStore(url)


async def test_names_with_special_characters_are_paths_and_no_uri(tmp_path: Path) -> None:
    path = tmp_path / "a b?mode=ro#%41.db"
    async with TokenCaptureStore(path) as store:
        await store.put(call("a", [1], [2]))
        assert len(await store.read_entries("r")) == 1
    assert path.exists()


async def test_a_file_that_is_no_database_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "notes.db"
    path.write_text("not a database at all, but long enough to look at" * 30)
    before = path.read_bytes()
    for create in (True, False):
        with pytest.raises(UnusableDatabaseError, match="notes"):
            await TokenCaptureStore(path, create=create).open()
        with pytest.raises(UnusableDatabaseError, match="notes"):
            await TokenCaptureStore(path, create=create).list_rollouts()
    assert path.read_bytes() == before


async def test_a_database_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE things (x)")
    connection.close()
    with pytest.raises(UnusableDatabaseError, match="another program"):
        await TokenCaptureStore(path).open()


async def test_a_missing_database_is_not_created_when_that_was_not_asked(tmp_path: Path) -> None:
    path = tmp_path / "missing.db"
    with pytest.raises(UnusableDatabaseError, match="no capture database"):
        await TokenCaptureStore(path, create=False).open()
    with pytest.raises(UnusableDatabaseError, match="no capture database"):
        await TokenCaptureStore(path, create=False).list_rollouts()
    assert os.listdir(tmp_path) == []


async def test_an_empty_file_becomes_a_database_only_for_who_makes_one_and_if_nothing_was_stored_in_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "captures.db"
    path.touch()
    with pytest.raises(UnusableDatabaseError, match="is an empty file: no capture was ever stored"):
        await TokenCaptureStore(path, create=False).open()
    assert path.stat().st_size == 0
    async with TokenCaptureStore(path) as store:
        await store.put(call("a", [1], [2]))
    os.truncate(path, 0)
    for create in (True, False):
        with pytest.raises(UnusableDatabaseError, match="another program emptied it"):
            await TokenCaptureStore(path, create=create).open()
    assert path.stat().st_size == 0
    path.unlink()
    async with TokenCaptureStore(path) as store:
        assert await store.read_entries("r") == ()


def test_what_is_neither_a_file_nor_a_directory_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.db")
    for path in (tmp_path / "pipe.db", Path("/dev/null")):
        with pytest.raises(UnusableDatabaseError, match=f"{path} is neither a file nor a directory"):
            database_path(path)


@pytest.mark.parametrize(("name", "message"), [("", "the name of the database is empty"), ("a" * 5000, "too long")])
def test_a_name_that_names_nothing_is_refused(name: str, message: str) -> None:
    with pytest.raises(UnusableDatabaseError, match=message):
        database_path(name)


def test_a_name_in_a_directory_that_was_removed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(UnusableDatabaseError, match=r"cannot open captures.db: No such file"):
        database_path("captures.db")


async def test_a_newer_schema_is_refused_for_reading_and_for_writing(store: TokenCaptureStore) -> None:
    change(store, "UPDATE alembic_version SET version_num = '9999'")
    await store.close()
    with pytest.raises(NewerSchemaError, match="upgrade token-id-capture"):
        await TokenCaptureStore(store.database).open()
    with pytest.raises(NewerSchemaError, match="upgrade token-id-capture"):
        await TokenCaptureStore(store.database).list_rollouts()


async def test_a_closed_store_says_so_and_closing_again_is_nothing(store: TokenCaptureStore) -> None:
    await store.put(call("a", [1], [2]))
    await store.close()
    await store.close()
    with pytest.raises(StoreClosedError, match="closed"):
        await store.put(call("b", [1], [2]))
    with pytest.raises(StoreClosedError):
        await store.list_rollouts()


async def test_an_unclosed_store_warns_and_ends_its_thread(tmp_path: Path) -> None:
    store = TokenCaptureStore(tmp_path / "captures.db")
    await store.put(call("a", [1], [2]))
    with pytest.warns(ResourceWarning, match="unclosed TokenCaptureStore"):
        del store


def test_one_store_serves_event_loops_that_follow_each_other(tmp_path: Path) -> None:
    store = TokenCaptureStore(tmp_path / "captures.db")
    asyncio.run(store.put(call("a", [1], [2])))
    assert len(asyncio.run(store.read_entries("r"))) == 1
    assert len(asyncio.run(store.freeze("r")).entries) == 1
    asyncio.run(store.close())


async def test_a_full_database_refuses_puts_keeps_marks_and_recovers(tmp_path: Path) -> None:
    limit = 600_000
    async with TokenCaptureStore(tmp_path / "captures.db", max_bytes=limit) as store:
        puts = [call(f"c{index}", list(range(4000)), [1, 2], f"r{index}") for index in range(100)]
        results = [await outcome_of(store.put(entry)) for entry in puts]
        stored = results.index(StorageFullError)
        assert stored > 3
        assert set(results[stored:]) == {StorageFullError}
        await store.mark_incomplete(f"r{stored}", f"c{stored}", "store_failed")
        assert (await store.freeze(f"r{stored}")).incomplete
        await store.delete([f"r{index}" for index in range(stored)])
        await store.put(call("again", list(range(4000)), [1, 2], "again"))
        assert len(await store.read_entries("again")) == 1
        assert rows(store, "PRAGMA integrity_check") == [("ok",)]


async def test_one_put_too_large_for_the_space_left_does_not_take_its_neighbours_with_it(tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path / "captures.db", max_bytes=900_000) as store:
        await store.open()
        large = call("large", list(range(400_000)), [1])
        small = [call(f"small{index}", [index], [1], f"s{index}") for index in range(20)]
        results = await asyncio.gather(
            *(store.put(entry) for entry in [*small[:10], large, *small[10:]]), return_exceptions=True
        )
        assert [type(result) for result in results if result is not None] == [StorageFullError]
        assert all([len(await store.read_entries(f"s{index}")) == 1 for index in range(20)])
        assert await store.read_entries("r") == ()


async def test_calls_are_neither_begun_nor_stored_while_less_than_the_floor_is_free(tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path / "captures.db", free_space_floor=2**62) as store:
        with pytest.raises(StorageFullError, match=r"call 'a' of rollout 'r' was not begun.*fewer than the floor"):
            await store.begin_call("r", "a")
        assert await store.list_rollouts() == []
        with pytest.raises(StorageFullError, match="fewer than the floor"):
            await store.put(call("a", [1], [2]))
        await store.mark_incomplete("r", "a", "store_failed")
        assert (await store.freeze("r")).incomplete


async def test_many_new_databases_can_be_opened_at_once(tmp_path: Path) -> None:
    stores = [TokenCaptureStore(tmp_path / f"{number}.db") for number in range(12)]
    await asyncio.gather(*(store.put(call(str(number), [1], [2], "first")) for number, store in enumerate(stores)))
    for number, store in enumerate(stores):
        assert [stored.model_call_id for stored in await store.read_entries("first")] == [str(number)]
        await store.close()


async def test_a_call_that_cannot_be_stored_makes_no_file(tmp_path: Path) -> None:
    store = TokenCaptureStore(tmp_path / "captures.db")
    with pytest.raises(TypeError):
        await store.put("no entry")  # type: ignore[arg-type]
    with pytest.raises(InvalidEntryError):
        await store.put(call("a", [1], [2]).model_copy(update={"surprise": object()}))
    await store.close()
    assert os.listdir(tmp_path) == []
