"""Bring a database file to the newest schema. The usual open costs one SELECT and no alembic."""

from __future__ import annotations

import importlib.resources
import threading
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Engine

from token_id_capture.store.file.revision import HEAD_REVISION, refuse_newer, revision_of


def migrate(engine: Engine, path: Path) -> None:
    """Upgrade behind the writer lock, in one transaction.

    Raises:
        NewerSchemaError: a newer release wrote the file.
    """
    with engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        revision = revision_of(driver, path)
    if revision == HEAD_REVISION:
        return
    refuse_newer(revision, path)
    with engine.begin() as connection:
        upgrade(connection)


# alembic keeps its context in a module, so two upgrades of one process would use each other's connection.
_upgrading: Final = threading.Lock()


def upgrade(connection: Connection) -> None:
    # Imported here, since a file that is up to date needs none of it.
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
