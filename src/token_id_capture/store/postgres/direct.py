"""Connections to a server without a store: one that only reads, and one that writes in short transactions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import psycopg

from token_id_capture.errors import UnusableDatabaseError
from token_id_capture.store.driver import Connection
from token_id_capture.store.file.revision import HEAD_REVISION
from token_id_capture.store.postgres.connection import ServerConnection
from token_id_capture.store.postgres.errors import translated
from token_id_capture.store.postgres.locks import lock
from token_id_capture.store.postgres.migrate import migrate
from token_id_capture.store.postgres.session import check_server, connect, revision
from token_id_capture.store.server_url import ServerUrl
from token_id_capture.store.write.queue import Batch


@contextmanager
def connected(url: ServerUrl) -> Iterator[ServerConnection]:
    """A connection; errors of the driver inside the block are translated."""
    try:
        connection = connect(url)
        try:
            yield connection
        finally:
            connection.close()
    except psycopg.Error as error:
        raise translated(error, url) or error from error


def is_older(url: ServerUrl) -> bool:
    """Whether the tables are those of an older release, which opening a store upgrades.

    Raises:
        UnusableDatabaseError: there are none.
    """
    with connected(url) as connection:
        return _known_revision(connection, url) != HEAD_REVISION


def _known_revision(connection: ServerConnection, url: ServerUrl) -> str:
    found = revision(connection, url)
    if found is None:
        raise UnusableDatabaseError(f"there is no capture database at {url}: check the URL given with --database")
    return found


@contextmanager
def read_only_server(url: ServerUrl) -> Iterator[ServerConnection]:
    """The same, on tables that this release reads. A standby will do.

    Raises:
        UnusableDatabaseError: there are none, or they are older; opening a store upgrades them.
        NewerSchemaError: they are newer.
    """
    with connected(url) as connection:
        found = _known_revision(connection, url)
        if found != HEAD_REVISION:
            raise UnusableDatabaseError(
                f"{url} has schema {found}, older than {HEAD_REVISION} of this release: tokcap ls upgrades it"
            )
        yield connection


class ServerMaintenance:
    """The writing connection of a housekeeping command."""

    def __init__(self, connection: ServerConnection) -> None:
        self.connection: Connection = connection
        self._raw = connection.raw

    @contextmanager
    def transaction(self) -> Iterator[Batch]:
        """One step in a transaction, which commits unless an error leaves the block."""
        with self._raw.transaction():
            yield Batch(self.connection, writer_id="", now=time.time(), shortage="")

    def lock(self, batch: Batch, rollout_ids: Iterable[str]) -> None:
        """Keep others from these rollouts until the transaction ends; what is read of them from now on stays true."""
        lock(batch, dict.fromkeys(rollout_ids, False))


@contextmanager
def server_maintenance(url: ServerUrl) -> Iterator[ServerMaintenance]:
    """Open an existing database on a server for housekeeping.

    Raises:
        UnusableDatabaseError: it is missing or cannot be used.
    """
    with connected(url) as connection:
        check_server(connection, url)
        migrate(connection, url, create=False)
        yield ServerMaintenance(connection)
