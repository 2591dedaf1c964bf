"""Bring a database file to the newest schema. The usual open costs one SELECT and no alembic."""

from __future__ import annotations

import importlib.resources
import sqlite3
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine

from token_id_capture.errors import NewerSchemaError, UnusableDatabaseError
from token_id_capture.store.schema import APPLICATION_ID, HEAD_REVISION


def revision_of(connection: Any, path: Path) -> str | None:
    """The schema revision that a DBAPI connection finds; None for a file without tables.

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
    from token_id_capture.store.engine import _uri

    connection = sqlite3.connect(_uri(path, "ro"), uri=True)
    try:
        return revision_of(connection, path)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorname == "SQLITE_READONLY_ROLLBACK":
            return None
        raise
    finally:
        connection.close()


def migrate(engine: Engine, path: Path) -> None:
    """Upgrade behind the gate, in one transaction.

    Raises:
        NewerSchemaError: a newer release wrote the file.
    """
    with engine.connect() as connection:
        revision = revision_of(connection.connection.driver_connection, path)
    if revision == HEAD_REVISION:
        return
    refuse_newer(revision, path)
    with engine.begin() as connection:
        _upgrade(connection)


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


def _upgrade(connection: Connection) -> None:
    # Imported here, since a file that is up to date needs none of it.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(migrations_directory()).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def migrations_directory() -> Path:
    """The folder with alembic's ``env.py``: in the wheel, else the repository's."""
    packaged = Path(str(importlib.resources.files("token_id_capture"))) / "migrations"
    if packaged.is_dir():
        return packaged
    return Path(__file__).resolve().parents[3] / "migrations"
