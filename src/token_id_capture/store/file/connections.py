"""Connections to the database file, and what every one of them is set to.

SQLAlchemy is imported where an engine is made: commands that read through the driver need none.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from token_id_capture.errors import StorageFullError, StoreError, UnusableDatabaseError
from token_id_capture.store.file.location import file_uri
from token_id_capture.store.file.revision import APPLICATION_ID

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.engine.interfaces import DBAPIConnection
    from sqlalchemy.ext.asyncio import AsyncEngine

PAGE_SIZE: Final = 4096
BUSY_TIMEOUT_MILLISECONDS: Final = 10_000
AUTOCHECKPOINT_PAGES: Final = 32_768
"""A backstop: it delays the commit that it is part of. Writers make their checkpoints after they have answered."""

SETTINGS: Final[dict[str, int]] = {
    # NORMAL loses acknowledged commits when the power fails.
    "synchronous": 2,
    # A backstop: the writer lock keeps writers apart.
    "busy_timeout": BUSY_TIMEOUT_MILLISECONDS,
    "foreign_keys": 1,
    # Some systems build it on; then a drop overwrites all that it frees.
    "secure_delete": 0,
    # Otherwise REPLACE would go past the triggers that keep evidence.
    "recursive_triggers": 1,
    "trusted_schema": 0,
    "mmap_size": 0,
    "cache_size": -16_384,
    "wal_autocheckpoint": AUTOCHECKPOINT_PAGES,
    "journal_size_limit": 268_435_456,
    **({"fullfsync": 1, "checkpoint_fullfsync": 1} if sys.platform == "darwin" else {}),
}

READING_SETTINGS: Final[dict[str, int]] = {
    "busy_timeout": BUSY_TIMEOUT_MILLISECONDS,
    "trusted_schema": 0,
    "cache_size": -16_384,
    "query_only": 1,
}

# PRAGMA mmap_size has no answer where SQLite was built without it.
_UNANSWERED: Final = {"mmap_size"}


def create_file(path: Path) -> None:
    """Create an empty database file with mode 0600 if there is none, and set what cannot change.

    Call it behind the writer lock. ``page_size`` and ``auto_vacuum`` take effect only before the first
    table, and a file whose creation was cut short before that is simply set again.
    """
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    _set_before_first_table(path)
    # If a loss of power left a log beside a file that is not in WAL mode, the first connection takes
    # it for one that is. It removes that log when it closes, and the second changes the file.
    _set_before_first_table(path)


def _set_before_first_table(path: Path) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            return
        connection.execute(f"PRAGMA page_size = {PAGE_SIZE}")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise UnusableDatabaseError(f"{path} cannot be put into WAL mode (it stays in {mode!r}): use a local disk")
    finally:
        connection.close()


def writing_engine(path: Path) -> Engine:
    """An engine whose one connection belongs to the writer thread; each transaction is IMMEDIATE.

    A deferred transaction that reads first and then writes fails at once under contention,
    whatever the busy timeout.
    """
    from sqlalchemy import URL, create_engine, event
    from sqlalchemy.pool import NullPool

    engine = create_engine(
        URL.create("sqlite", database=file_uri(path, "rw"), query={"uri": "true"}),
        poolclass=NullPool,
        connect_args={"check_same_thread": False},
    )

    @event.listens_for(engine, "connect")
    def _set(connection: DBAPIConnection, record: Any) -> None:
        connection.isolation_level = None
        _apply_settings(connection, path)

    @event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def reading_engine(path: Path) -> AsyncEngine:
    """An engine of read-only connections. They never write, and never checkpoint when they close.

    One is kept for the next read. The pool never makes a caller wait, so it belongs to no event
    loop, and neither does a connection between two uses.
    """
    from sqlalchemy import URL, event
    from sqlalchemy.ext.asyncio import create_async_engine

    url = URL.create("sqlite+aiosqlite", database=file_uri(path, "ro"), query={"uri": "true"})
    engine = create_async_engine(url, pool_size=1, max_overflow=-1)

    @event.listens_for(engine.sync_engine, "connect")
    def _set(connection: Any, record: Any) -> None:
        set_for_reading(connection)

    @event.listens_for(engine.sync_engine, "begin")
    def _begin(connection: Any) -> None:
        # The driver begins none for statements that only read, and several must see one state.
        connection.exec_driver_sql("BEGIN")

    return engine


def set_for_reading(connection: Any) -> None:
    """Make a connection of any driver read-only. Every code path that opens one for reading calls this."""
    cursor = connection.cursor()
    for name, value in READING_SETTINGS.items():
        cursor.execute(f"PRAGMA {name} = {value}")
    cursor.close()


def _apply_settings(connection: Any, path: Path) -> None:
    for name, value in SETTINGS.items():
        connection.execute(f"PRAGMA {name} = {value}")
        answer = connection.execute(f"PRAGMA {name}").fetchone()
        if name not in _UNANSWERED and (answer is None or answer[0] != value):
            raise UnusableDatabaseError(f"{path}: PRAGMA {name} reads {answer} after it was set to {value}")
    if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        raise UnusableDatabaseError(f"{path} is not in WAL mode: it was changed by another program")


def has_wal_reset_bug(version: tuple[int, ...] = sqlite3.sqlite_version_info) -> bool:
    """Whether this SQLite has the WAL-reset bug (3.7.0 to 3.51.2, except from 3.44.6 and 3.50.7 on)."""
    if version >= (3, 51, 3) or version < (3, 7, 0):
        return False
    fixed_in = {(3, 44): 6, (3, 50): 7}.get((version[0], version[1]))
    return fixed_in is None or version[2] < fixed_in


def translated(error: BaseException, path: Path) -> StoreError | None:
    """This package's error for an error of the driver, or None if it is none of the driver's.

    The one place where errors of SQLite become ours; a test goes through the codes.
    """
    cause = getattr(error, "orig", error)
    if isinstance(cause, OSError):
        return UnusableDatabaseError(f"cannot open {path}: {cause.strerror or cause}")
    if not isinstance(cause, sqlite3.Error):
        return None
    name = _error_name(error)
    if name.startswith("SQLITE_FULL"):
        return StorageFullError(f"no room in {path}: nothing was stored. Free some space, then try again.")
    if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
        return UnusableDatabaseError(f"{path} is not a usable SQLite database ({cause}): check it, or name another")
    if name.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH")):
        return UnusableDatabaseError(f"cannot write {path} ({cause}): check that it and its directory are writable")
    if is_locked(error):
        return StoreError(f"{path} is locked by another program ({cause}): end it, then try again")
    return StoreError(f"{path}: {cause} ({name or type(cause).__name__})")


def is_input_output_error(error: BaseException) -> bool:
    """Whether SQLite could not say if a commit reached the disk."""
    return _error_name(error).startswith("SQLITE_IOERR")


def is_locked(error: BaseException) -> bool:
    """Whether another program kept the database locked until the patience was over."""
    return _error_name(error).startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))


def _error_name(error: BaseException) -> str:
    return getattr(getattr(error, "orig", error), "sqlite_errorname", "") or ""
