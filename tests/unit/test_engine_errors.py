"""How connections are set, and the one place where errors of SQLite become ours."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from token_id_capture import errors
from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore
from token_id_capture.store.file import connections as engine
from token_id_capture.store.file.connections import has_wal_reset_bug, is_input_output_error, translated
from token_id_capture.store.file.revision import APPLICATION_ID
from token_id_capture.store.write.writer import Writer

ENTRY = TokenEntry(
    rollout_id="first",
    model_call_id="a",
    prompt_token_ids=[1],
    generation_token_ids=[2],
    generation_log_probs=[-0.5],
)

EXPECTED = {
    "SQLITE_FULL": errors.StorageFullError,
    "SQLITE_NOTADB": errors.UnusableDatabaseError,
    "SQLITE_CORRUPT": errors.UnusableDatabaseError,
    "SQLITE_CANTOPEN": errors.UnusableDatabaseError,
    "SQLITE_READONLY": errors.UnusableDatabaseError,
    "SQLITE_PERM": errors.UnusableDatabaseError,
    "SQLITE_AUTH": errors.UnusableDatabaseError,
}
CODES = sorted(
    name
    for name, value in vars(sqlite3).items()
    if name.startswith("SQLITE_")
    and isinstance(value, int)
    and name.split("_")[1]
    in {
        "ABORT",
        "AUTH",
        "BUSY",
        "CANTOPEN",
        "CONSTRAINT",
        "CORRUPT",
        "ERROR",
        "FULL",
        "INTERNAL",
        "INTERRUPT",
        "IOERR",
        "LOCKED",
        "MISMATCH",
        "MISUSE",
        "NOLFS",
        "NOMEM",
        "NOTADB",
        "PERM",
        "PROTOCOL",
        "RANGE",
        "READONLY",
        "SCHEMA",
        "TOOBIG",
    }
    and not name.endswith("MASK")
)


def _driver_error(name: str) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(f"what SQLite says to {name}")
    error.sqlite_errorname = name
    return error


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("wrapped", [False, True], ids=["of the driver", "of SQLAlchemy"])
def test_every_error_of_sqlite_becomes_one_of_ours(name: str, wrapped: bool, tmp_path: Path) -> None:
    driver_error = _driver_error(name)
    error = OperationalError("COMMIT", {}, driver_error) if wrapped else driver_error
    ours = translated(error, tmp_path / "captures.db")
    family = "_".join(name.split("_")[:2])
    assert type(ours) is EXPECTED.get(family, errors.StoreError)
    assert str(tmp_path / "captures.db") in str(ours)
    assert is_input_output_error(error) == (family == "SQLITE_IOERR")


def test_the_list_of_codes_is_the_drivers_own() -> None:
    assert len(CODES) > 60


def test_errors_of_others_are_left_alone(tmp_path: Path) -> None:
    assert translated(ValueError("a mistake"), tmp_path) is None
    assert translated(KeyError("x"), tmp_path) is None
    assert not is_input_output_error(ValueError("SQLITE_IOERR"))


def test_an_error_of_the_operating_system_says_what_it_was(tmp_path: Path) -> None:
    ours = translated(PermissionError(13, "Permission denied"), tmp_path / "captures.db")
    assert type(ours) is errors.UnusableDatabaseError
    assert "Permission denied" in str(ours)


@pytest.mark.parametrize(
    ("version", "has_bug"),
    [
        ((3, 6, 23), False),
        ((3, 7, 0), True),
        ((3, 40, 1), True),
        ((3, 44, 5), True),
        ((3, 44, 6), False),
        ((3, 45, 0), True),
        ((3, 50, 6), True),
        ((3, 50, 7), False),
        ((3, 51, 2), True),
        ((3, 51, 3), False),
        ((3, 52, 0), False),
        ((4, 0, 0), False),
    ],
)
def test_versions_with_the_wal_reset_bug_are_known(version: tuple[int, ...], has_bug: bool) -> None:
    assert has_wal_reset_bug(version) is has_bug


async def test_a_new_file_is_set_before_its_first_table(tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        assert stat.S_IMODE((tmp_path / "captures.db").stat().st_mode) == 0o600
        with closing(sqlite3.connect(store.database)) as connection:
            settings = {
                name: connection.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("journal_mode", "page_size", "auto_vacuum")
            }
    assert settings == {"journal_mode": "wal", "page_size": 4096, "auto_vacuum": 2}


async def test_the_writing_connection_is_set_as_the_settings_say(tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        writer = store._backend.live_writer()
        assert isinstance(writer, Writer)
        driver = writer._driver()
        for name, value in engine.SETTINGS.items():
            answer = driver.execute(f"PRAGMA {name}").fetchone()
            assert answer is None if name in engine._UNANSWERED and answer is None else answer == (value,)


async def test_a_setting_that_does_not_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # SQLite knows synchronous levels up to 3, and masks others.
    monkeypatch.setitem(engine.SETTINGS, "synchronous", 9)
    store = TokenCaptureStore(tmp_path / "captures.db")
    with pytest.raises(errors.UnusableDatabaseError, match="PRAGMA synchronous reads"):
        await store.open()
    await store.close()


async def test_a_file_that_another_program_took_out_of_wal_mode_is_refused(tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        await store.put(ENTRY)
    with closing(sqlite3.connect(tmp_path / "captures.db")) as connection:
        assert connection.execute("PRAGMA journal_mode = DELETE").fetchone() == ("delete",)
    store = TokenCaptureStore(tmp_path / "captures.db")
    with pytest.raises(errors.UnusableDatabaseError, match="not in WAL mode"):
        await store.put(ENTRY)
    await store.close()


async def test_a_reading_connection_cannot_write(tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        await store.put(ENTRY)
        with pytest.raises(errors.UnusableDatabaseError, match="readonly"):
            await store._backend.read(lambda execute: execute("DELETE FROM entries", {}))
        assert await store.read_entries("first") == (ENTRY,)


async def test_a_lock_that_another_program_keeps_is_named_and_the_store_goes_on_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(engine.SETTINGS, "busy_timeout", 50)
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        with closing(sqlite3.connect(store.database, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(errors.StoreError, match="locked by another program"):
                await store.put(ENTRY)
            other.execute("ROLLBACK")
        await asyncio.wait_for(store.put(ENTRY), 60)
        assert await store.read_entries("first") == (ENTRY,)


async def test_a_log_that_outlived_the_creation_of_its_database_does_not_pass_for_wal_mode(tmp_path: Path) -> None:
    # What a loss of power can leave: the switch to WAL mode undone by the rollback journal, its log not.
    with closing(sqlite3.connect(tmp_path / "captures.db", isolation_level=None)) as connection:
        connection.execute(f"PRAGMA page_size = {engine.PAGE_SIZE}")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    (tmp_path / "captures.db-wal").write_bytes(bytes(32))
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        await store.put(ENTRY)
        assert await store.read_entries("first") == (ENTRY,)
