"""What tells a capture database from other files, and how new its schema is."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

from token_id_capture.errors import NewerSchemaError, UnusableDatabaseError
from token_id_capture.store.file.location import reading_uri

HEAD_REVISION: Final = "0009"
"""The newest revision of ``migrations/versions``; a test holds the two together."""

APPLICATION_ID: Final = 0x746F6B63
"""``PRAGMA application_id`` of a capture database: the letters "tokc"."""


def revision_of(connection: sqlite3.Connection, path: Path) -> str | None:
    """The schema revision that a connection finds; None for a file without tables.

    Raises:
        UnusableDatabaseError: an SQLite file that some other program made.
    """
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables:
        return None
    if "alembic_version" not in tables or connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise UnusableDatabaseError(
            f"{path} is an SQLite database of another program: name a new file, and it will be created"
        )
    row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    return str(row[0]) if row else None


def file_revision(path: Path) -> str | None:
    """The schema revision of an existing file, read without changing it.

    None also for a file whose creation was cut short, which only a connection that may write can
    undo.

    Raises:
        sqlite3.Error: it cannot be read; translate it.
        UnusableDatabaseError: an SQLite file of another program.
    """
    connection = sqlite3.connect(reading_uri(path), uri=True)
    try:
        return revision_of(connection, path)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorname == "SQLITE_READONLY_ROLLBACK":
            return None
        raise
    finally:
        connection.close()


def refuse_newer(revision: str | None, path: Path) -> None:
    """Raise unless this release can read, or upgrade, a file of this revision.

    Raises:
        NewerSchemaError: a newer release wrote the file.
    """
    # Revisions are numbered, so an unknown one that is not smaller is a later one.
    if revision is not None and revision > HEAD_REVISION:
        raise NewerSchemaError(
            f"{path} has schema {revision}, and this release knows schemas up to {HEAD_REVISION}: "
            "upgrade token-id-capture to read it"
        )
