"""A read-only connection for work that looks at the file as a whole."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from token_id_capture.errors import UnusableDatabaseError
from token_id_capture.store.driver import Connection
from token_id_capture.store.file.connections import set_for_reading, translated
from token_id_capture.store.file.location import file_uri, missing, reading_uri, stands_alone
from token_id_capture.store.file.lock import empty
from token_id_capture.store.file.revision import HEAD_REVISION, file_revision, refuse_newer, revision_of


@contextmanager
def read_only(
    path: Path, *, nobody_writes: bool = False, may_vacuum_into: bool = False
) -> Iterator[sqlite3.Connection]:
    """A connection that cannot change the file, and never checkpoints. Its statements autocommit.

    Args:
        nobody_writes: the caller alone knows this file. Then no lock is taken, and no ``-shm`` file
            is made beside it. On a file that somebody writes, this misses what is in the WAL.
        may_vacuum_into: let ``VACUUM INTO`` make another file, which ``query_only`` forbids.

    Raises:
        UnusableDatabaseError: it is missing, of another program, damaged beyond reading, or has no
            schema that this release reads; errors of SQLite inside the block are translated too.
    """
    if not path.exists():
        raise missing(path)
    try:
        alone = stands_alone(path)
        before = path.stat()
        connection = connect(path, nobody_writes=nobody_writes)
        try:
            if may_vacuum_into:
                connection.execute("PRAGMA query_only = OFF")
            _check_revision(revision_of(connection, path), path)
            yield connection
            if alone and (path.stat().st_mtime_ns != before.st_mtime_ns or not stands_alone(path)):
                raise UnusableDatabaseError(
                    f"{path} changed while it was read where this process cannot see who writes it: what was read may "
                    "be wrong. Read it on the machine of its servers, or copy it there with tokcap backup"
                )
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise _unreadable(error, path) from error


def connect(path: Path, *, nobody_writes: bool = False, **options: Any) -> sqlite3.Connection:
    """A connection that cannot change the file, as ``read_only`` has it, without a look at the schema.

    ``options`` are more of ``sqlite3.connect``. Errors are those of the driver.
    """
    uri = file_uri(path, "ro") + "&immutable=1" if nobody_writes else reading_uri(path)
    connection: sqlite3.Connection = sqlite3.connect(uri, uri=True, isolation_level=None, **options)
    try:
        set_for_reading(connection)
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def needs_a_writer(path: Path) -> bool:
    """Whether the file must be opened for writing once: it is older, or its creation was cut short.

    Raises:
        UnusableDatabaseError: it is missing, or cannot be used.
    """
    if not path.exists():
        raise missing(path)
    try:
        revision = file_revision(path)
    except sqlite3.Error as error:
        raise _unreadable(error, path) from error
    if revision is not None and stands_alone(path):
        _check_revision(revision, path)
    return path.stat().st_size > 0 if revision is None else revision < HEAD_REVISION


@contextmanager
def transaction(connection: Connection) -> Iterator[None]:
    """Everything inside sees one state of the database. Keep it short: it pins the WAL."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        # SQLite ends it by itself after some errors.
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def wal_bytes(path: Path) -> int:
    """The size of the write-ahead log in bytes."""
    try:
        return os.stat(f"{path}-wal").st_size
    except OSError:
        return 0


def _check_revision(revision: str | None, path: Path) -> None:
    refuse_newer(revision, path)
    if revision is None:
        raise empty(path)
    if revision != HEAD_REVISION:
        first = "copy it to a directory where you may write, and " if stands_alone(path) else ""
        raise UnusableDatabaseError(
            f"{path} has schema {revision}, older than {HEAD_REVISION} of this release: {first}tokcap ls upgrades it"
        )


def _unreadable(error: sqlite3.Error, path: Path) -> Exception:
    if getattr(error, "sqlite_errorname", "").startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY")):
        # WAL mode keeps an index beside the file, which even a reader has to make if it is not there.
        if wal_bytes(path) and not os.access(path.parent, os.W_OK):
            return UnusableDatabaseError(
                f"{path} has a write-ahead log that cannot be read where nobody may write: copy the file and its "
                "-wal to a directory of your own, and read the copy"
            )
        return UnusableDatabaseError(f"cannot open {path}: check that you may read it and write to its directory")
    return translated(error, path) or error
