"""Connections to a server, and what must be true of it before anything is acknowledged.

Nothing here, or anywhere in this package, is a property of a session: each transaction says what it needs, and
statements are not prepared on the server. So a pooler may give each transaction another session (PgBouncer's
transaction mode).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict

from token_id_capture.errors import NewerSchemaError, UnusableDatabaseError
from token_id_capture.store.driver import Connection
from token_id_capture.store.file.revision import HEAD_REVISION
from token_id_capture.store.postgres.connection import ServerConnection
from token_id_capture.store.server_url import ServerUrl

# A host that lost its power closes no connection; the other side notices within this time.
_DEFAULTS: Final = {
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "4",
    "tcp_user_timeout": "30000",
    "fallback_application_name": "tokcap",
}

_SETTINGS: Final = ("synchronous_commit", "fsync", "full_page_writes", "data_checksums")
_FACTS: Final = """
    SELECT current_setting('server_version'), pg_is_in_recovery(), getdatabaseencoding(),
           current_setting('synchronous_commit'), current_setting('fsync'), current_setting('full_page_writes'),
           current_setting('data_checksums')
"""
# Not to_regclass, which remembers within a transaction that there was no table before it waited for a lock.
_TABLES: Final = """
    SELECT tablename FROM pg_tables
    WHERE schemaname = ANY (current_schemas(false)) AND tablename IN ('alembic_version', 'capture_file')
"""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says of itself."""

    version: str
    standby: bool
    encoding: str
    settings: dict[str, str]

    @property
    def problem(self) -> str:
        """Why what it acknowledges may be lost, or cannot be stored at all; empty if it is fit."""
        if self.settings["synchronous_commit"] == "off":
            return "synchronous_commit is off there, so a crash of the server loses what it acknowledged: turn it on"
        if self.settings["fsync"] == "off":
            return "fsync is off there, so a power loss destroys what it acknowledged: turn it on"
        if self.standby:
            return "it is a standby, which accepts no writes: name the primary"
        if self.encoding != "UTF8":
            return f"its encoding is {self.encoding}: create the database with ENCODING 'UTF8'"
        return ""


def connect(url: ServerUrl) -> ServerConnection:
    """A new connection. Errors are those of the driver.

    Raises:
        UnusableDatabaseError: the URL cannot be read; the message does not repeat it.
    """
    try:
        known = conninfo_to_dict(url.conninfo)
    except psycopg.ProgrammingError:
        raise UnusableDatabaseError(
            f"the URL of {url} cannot be read: encode special characters, as %40 for @"
        ) from None
    settings: dict[str, Any] = {**_DEFAULTS, **known}
    raw = psycopg.connect(**settings, autocommit=True, prepare_threshold=None)
    return ServerConnection(raw)


def facts(connection: Connection) -> ServerFacts:
    """Ask the server about itself."""
    version, standby, encoding, *values = connection.execute(_FACTS).fetchone()
    return ServerFacts(version, standby, encoding, dict(zip(_SETTINGS, values, strict=True)))


def check_server(connection: ServerConnection, url: ServerUrl) -> None:
    """Refuse a server that would not keep what it acknowledges.

    Raises:
        UnusableDatabaseError: it would not; the message says why.
    """
    problem = facts(connection).problem
    if problem:
        raise UnusableDatabaseError(f"{url} cannot hold captures: {problem}")


def revision(connection: ServerConnection, url: ServerUrl) -> str | None:
    """The schema revision of the database; None if it has no tables of this package.

    Raises:
        UnusableDatabaseError: its tables are those of another program.
        NewerSchemaError: a newer release made them.
    """
    tables = {row[0] for row in connection.execute(_TABLES)}
    if "alembic_version" not in tables:
        return None
    if "capture_file" not in tables:
        raise UnusableDatabaseError(f"{url} has tables of another program: name a database, or a schema, of its own")
    row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    found = str(row[0]) if row else None
    if found is not None and found > HEAD_REVISION:
        raise NewerSchemaError(
            f"{url} has schema {found}, and this release knows schemas up to {HEAD_REVISION}: "
            "upgrade token-id-capture to use it"
        )
    return found


def file_id_of(connection: ServerConnection, url: ServerUrl) -> str:
    """What tells this database from every other.

    Raises:
        UnusableDatabaseError: there is no such row.
    """
    row = connection.execute("SELECT file_id FROM capture_file").fetchone()
    if row is None:
        raise UnusableDatabaseError(f"{url} has lost its identity, the row in capture_file: restore a backup")
    return str(row[0])
