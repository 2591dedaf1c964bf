"""Housekeeping that writes: a connection of its own, and short transactions behind the writer lock.

It takes turns with the writers of running processes, one step at a time, and leaves the writer lock to
them for as long as its latest step took.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from token_id_capture.errors import ReplacedDatabaseError
from token_id_capture.store.driver import Connection
from token_id_capture.store.file.connections import BUSY_TIMEOUT_MILLISECONDS, translated
from token_id_capture.store.file.durability import cut_short, settle
from token_id_capture.store.file.lock import WriterLock
from token_id_capture.store.file.opening import open_for_writing
from token_id_capture.store.reading import Location
from token_id_capture.store.server_url import ServerUrl
from token_id_capture.store.write.queue import Batch

# flock is not fair: a process that unlocks and locks again at once overtakes those that wait.
_SHORTEST_PAUSE_SECONDS: Final = 0.001
_CHECKPOINT_ATTEMPTS: Final = 20
_CHECKPOINT_PAUSE_SECONDS: Final = 0.1


class Housekeeping(Protocol):
    """What writes to a database of either kind, one short step at a time."""

    @property
    def connection(self) -> Connection:
        """Where it reads, and writes within a transaction."""
        ...

    def transaction(self) -> AbstractContextManager[Batch]:
        """One step in a transaction, which commits unless an error leaves the block."""
        ...

    def lock(self, batch: Batch, rollout_ids: Iterable[str]) -> None:
        """Keep others from these rollouts until the transaction ends."""
        ...


class Maintenance:
    """The writing connection of a housekeeping command; see ``maintenance``."""

    def __init__(self, path: Path, connection: sqlite3.Connection, writer_lock: WriterLock) -> None:
        self.path = path
        self.connection = connection
        self._writer_lock = writer_lock

    @contextmanager
    def turn(self) -> Iterator[sqlite3.Connection]:
        """One step behind the writer lock, then a pause of the same length for others."""
        with self._writer_lock:
            begun = time.monotonic()
            if self._writer_lock.shrunk:
                if cut_short(self.connection, self.path):
                    raise ReplacedDatabaseError(f"{self.path} was cut short by another program: restore a backup")
                self._writer_lock.accept_sizes()
            if self._writer_lock.in_doubt:
                settle(self.connection, self.path, self._writer_lock)
            yield self.connection
        time.sleep(max(_SHORTEST_PAUSE_SECONDS, time.monotonic() - begun))

    @contextmanager
    def transaction(self) -> Iterator[Batch]:
        """One step in a transaction, which commits unless an error leaves the block."""
        with self.turn() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield Batch(connection, writer_id="", now=time.time(), shortage="")
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def lock(self, batch: Batch, rollout_ids: Iterable[str]) -> None:
        """Nothing is to be done: the writer lock keeps others from the whole file."""

    def checkpoint(self) -> bool:
        """Move the WAL into the file and cut both to size; False if a reader kept it from that."""
        for _ in range(_CHECKPOINT_ATTEMPTS):
            with self.turn() as connection:
                # The writer lock is not kept while a reader has the WAL.
                connection.execute("PRAGMA busy_timeout = 0")
                busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
                connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MILLISECONDS}")
            if not busy:
                return True
            time.sleep(_CHECKPOINT_PAUSE_SECONDS)
        return False


@contextmanager
def maintenance(path: Path, *, create: bool = False) -> Iterator[Maintenance]:
    """Open a database for housekeeping; errors of SQLite inside the block are translated.

    Args:
        create: make the file if it is missing.

    Raises:
        UnusableDatabaseError: it is missing or cannot be used.
    """
    writer_lock = WriterLock(path)
    try:
        engine = open_for_writing(path, writer_lock, create=create)
        pooled = engine.raw_connection()
        try:
            driver: Any = pooled.driver_connection
            yield Maintenance(path, driver, writer_lock)
        finally:
            # The last connection that closes makes a checkpoint, which belongs behind the writer lock.
            with writer_lock:
                pooled.close()
                engine.dispose()
    except sqlite3.Error as error:
        raise translated(error, path) or error from error
    finally:
        writer_lock.close()


@contextmanager
def housekeeping(location: Location) -> Iterator[Housekeeping]:
    """Open an existing database, wherever it is, for short steps that write.

    Raises:
        UnusableDatabaseError: it is missing or cannot be used.
    """
    if isinstance(location, ServerUrl):
        from token_id_capture.store.postgres.direct import server_maintenance

        with server_maintenance(location) as server:
            yield server
    else:
        with maintenance(location) as file:
            yield file
