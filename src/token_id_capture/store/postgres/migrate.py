"""Bring a database on a server to the newest schema.

A new one gets the whole schema of one revision, as a file of SQL. What came after that revision is alembic's, whose
revisions are written for both databases from then on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy import Connection, create_engine
from sqlalchemy.pool import StaticPool

from token_id_capture.errors import UnusableDatabaseError
from token_id_capture.store.file.migrate import migrations_directory, upgrade
from token_id_capture.store.file.revision import HEAD_REVISION
from token_id_capture.store.postgres.connection import ServerConnection
from token_id_capture.store.postgres.session import revision
from token_id_capture.store.server_url import ServerUrl

BASELINE: Final = "0007"
"""The revision of which the file of SQL is."""

_LOCK: Final = 0x746F6B63
"""The letters "tokc": processes that create or upgrade a database on this server wait for each other."""


def migrate(connection: ServerConnection, url: ServerUrl, *, create: bool) -> None:
    """Create the tables or upgrade them, in one transaction. Many processes may do this at once.

    Raises:
        UnusableDatabaseError: there are none and ``create`` is false, or they are those of another program.
        NewerSchemaError: a newer release made them.
    """
    found = revision(connection, url)
    if found == HEAD_REVISION:
        return
    if found is None and not create:
        raise UnusableDatabaseError(f"there is no capture database at {url}: check the URL given with --database")
    with _transaction(connection) as alchemy:
        connection.execute("SELECT pg_advisory_xact_lock(?)", [_LOCK])
        # Looked at again: another process may have done it meanwhile.
        if revision(connection, url) is None:
            statements = migrations_directory() / "postgresql" / f"{BASELINE}.sql"
            connection.raw.execute(statements.read_bytes())
        if revision(connection, url) != HEAD_REVISION:
            upgrade(alchemy)


@contextmanager
def _transaction(connection: ServerConnection) -> Iterator[Connection]:
    """A transaction on the connection, for SQLAlchemy too, which wants to begin and end it itself."""
    engine = create_engine("postgresql+psycopg://", creator=lambda: connection.raw, poolclass=StaticPool)
    connection.raw.autocommit = False
    try:
        with engine.begin() as alchemy:
            yield alchemy
    finally:
        if connection.usable:
            connection.raw.autocommit = True
