"""Bring a database file to the newest schema. The usual open costs one SELECT, and a new file no alembic."""

from __future__ import annotations

import importlib.resources
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Engine

from token_id_capture.store.file.revision import HEAD_REVISION, refuse_newer, revision_of


def migrate(engine: Engine, path: Path) -> None:
    """Create the tables or upgrade them, behind the writer lock, in one transaction.

    Raises:
        NewerSchemaError: a newer release wrote the file.
    """
    with engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        revision = revision_of(driver, path)
        empty = driver.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    if revision == HEAD_REVISION:
        return
    refuse_newer(revision, path)
    with engine.begin() as connection:
        if empty:
            for statement in _new_schema():
                connection.exec_driver_sql(statement)
        else:
            upgrade(connection)


def _new_schema() -> Iterator[str]:
    """The statements that make what all revisions make one after the other, in a tenth of the time."""
    statement = ""
    text = (migrations_directory() / "sqlite" / "schema.sql").read_text("utf-8")
    for line in text.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):  # a trigger has semicolons in it
            yield statement
            statement = ""


# alembic keeps its context in a module, so two upgrades of one process would use each other's connection.
_upgrading: Final = threading.Lock()


def upgrade(connection: Connection) -> None:
    # Imported here, since a file that is new or up to date needs none of it.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(migrations_directory()).replace("%", "%%"))
    config.attributes["connection"] = connection
    with _upgrading:
        command.upgrade(config, "head")


def migrations_directory() -> Path:
    """The folder with alembic's ``env.py``: in the wheel, else the repository's."""
    packaged = Path(str(importlib.resources.files("token_id_capture"))) / "migrations"
    if packaged.is_dir():
        return packaged
    return Path(__file__).resolve().parents[4] / "migrations"
