"""The one thread of a process that writes: it commits what waits in groups, behind the writer lock.

A job waits in a bounded queue. The thread takes the writer lock first and drains the queue only then, so
the wait for the writer lock is what collects a group, and no timer is needed. One transaction serves all
jobs of a group, one fsync makes them durable, and one wake-up a loop tells their callers.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from typing import Any, Final

from sqlalchemy import Connection, Engine

from token_id_capture.errors import UnusableDatabaseError
from token_id_capture.store.file import forking
from token_id_capture.store.file.connections import is_input_output_error, is_locked, translated
from token_id_capture.store.file.durability import UnsettledError, cut_short, settle
from token_id_capture.store.file.lock import WriterLock
from token_id_capture.store.file.open_files import DatabaseFile, OpenFiles
from token_id_capture.store.file.opening import open_for_writing
from token_id_capture.store.file.read_only import wal_bytes
from token_id_capture.store.file.warnings import PinnedWalWarning, warn
from token_id_capture.store.write.queue import Batch, Job, resolve
from token_id_capture.store.write.thread import Limits, WriterThread, fail

logger = logging.getLogger(__name__)

CHECKPOINT_BYTES: Final = 64 * 2**20
TRUNCATE_BYTES: Final = 256 * 2**20
IDLE_SECONDS: Final = 1.0
YIELD_SECONDS: Final = 0.001
SHORTAGE_SECONDS: Final = 0.2


class Writer(WriterThread):
    """Owns the writing connection of one process to one database."""

    def __init__(
        self, database: DatabaseFile, limits: Limits, *, create: bool, predecessor: WriterThread | None = None
    ) -> None:
        """``predecessor`` is a writer that failed; its connection is closed before another is opened."""
        super().__init__(database.path.name, limits, predecessor)
        self.path = path = database.path
        self._database = database
        self._create = create
        self._writer_lock = WriterLock(path)
        self._engine: Engine | None = None
        self._connection: Connection | None = None
        self._files = OpenFiles(database)
        self._registered = False
        self._pinned = False
        self._pin_reported = False
        self._moved = 0
        self._dirty = False
        self._shortage_seen: tuple[float, str] | None = None
        # Held by the thread while it is at the database, and by a fork.
        self._turn = threading.Lock()

    def start(self) -> None:
        """Start the thread; it opens the database itself, and fails the waiting jobs if it can't."""
        forking.watch(self)
        super().start()

    def close_for_fork(self) -> bool:
        """Close the connection between two groups."""
        self._turn.acquire()
        if self._connection is not None:
            with contextlib.suppress(OSError), self._writer_lock:
                self._drop_connection()
        self._writer_lock.close()
        return self._connection is None

    def go_on_after_fork(self) -> None:
        """Let the thread continue; it opens the database again when there is something to do."""
        self._turn.release()

    def _run(self) -> None:
        try:
            self._follow_predecessor()
            with self._turn:
                self._open(create=self._create)
            while self._queue.wait(IDLE_SECONDS if self._dirty else None):
                with self._turn:
                    if self._connection is None:
                        self._open(create=False)
                    group = self._serve()
                    # Looked at before the answer, which brings new ones while others are at the writer lock already.
                    more = bool(self._queue.jobs)
                    resolve(group)
                    self._checkpoint(idle=not group)
                if more:
                    # flock has no order: who locks again at once overtakes the processes that wait.
                    time.sleep(YIELD_SECONDS)
        except BaseException as error:
            self.failure = translated(error, self.path) or error
            if self._connection is not None:
                logger.error("the writer of %s ended: %s", self.path, self.failure)
        finally:
            with self._turn:
                self._shut()

    def _serve(self) -> list[Job]:
        """Commit the next group. Its callers are still to be told, except those of one that ends the writer."""
        group: list[Job] = []
        try:
            with self._writer_lock:
                group = self._queue.take()
                if group:
                    self._commit_or_recover(group)
        except BaseException as error:
            # Before the callers know, so that one who tries again finds a new writer.
            self.failure = translated(error, self.path) or error
            self._queue.close()
            self._fail(group, error)
            resolve(group)
            raise
        return group

    def _open(self, *, create: bool) -> None:
        self._database.check()
        # Only at the first open of all: a file in place of one that was there would lack what was stored.
        create = create and not self._database.known
        self._connect(open_for_writing(self.path, self._writer_lock, create=create))

    def _connect(self, engine: Engine) -> None:
        self._engine = engine
        self._connection = engine.connect()
        self._database.recognise(self._driver())
        self._files = OpenFiles(self._database)
        if self._limits.max_bytes is not None:
            page_size = self._raw("PRAGMA page_size")[0]
            self._raw(f"PRAGMA max_page_count = {max(1, self._limits.max_bytes // page_size)}")

    def _shut(self) -> None:
        self._stop_taking()
        with contextlib.suppress(Exception):
            if self._connection is not None:
                # Closing may make a checkpoint too, so it must not be left to the garbage collector.
                with contextlib.suppress(Exception), self._writer_lock:
                    self._run_checkpoint("TRUNCATE")
                with self._writer_lock:
                    self._drop_connection()
        self._writer_lock.close()

    def _drop_connection(self) -> None:
        connection, engine = self._connection, self._engine
        self._connection = self._engine = None
        with contextlib.suppress(Exception):
            if connection is not None:
                connection.close()
        if engine is not None:
            engine.dispose()

    def _commit_or_recover(self, group: list[Job], *, recovered: bool = False) -> None:
        try:
            if self._writer_lock.shrunk:
                self._database.check()
                if cut_short(self._driver(), self.path):
                    self._database.refuse()
                self._writer_lock.accept_sizes()
            if self._writer_lock.in_doubt:
                settle(self._driver(), self.path, self._writer_lock)
            self._commit(group)
        except UnusableDatabaseError:
            raise
        except UnsettledError as error:
            self._fail(group, error)
        except Exception as error:
            if is_input_output_error(error):
                if recovered:
                    raise
                self._recover(group, error)
            elif len(group) > 1 and not is_locked(error):
                # All of it was rolled back. One that fails must not take its neighbours with it, and
                # on a full disk what needs little room, such as a mark, may fit.
                for half in (group[: len(group) // 2], group[len(group) // 2 :]):
                    self._commit_or_recover(half, recovered=recovered)
            else:
                self._fail(group, error)

    def _recover(self, group: list[Job], error: Exception) -> None:
        """After an I/O error nobody knows whether the commit is on disk: settle what is, and do it again.

        Every operation may be repeated, as it is idempotent or only adds a mark.
        """
        self._writer_lock.doubt()
        logger.error("I/O error while committing to %s; reopening it (%s)", self.path, error)
        self._drop_connection()
        self._database.check()
        self._connect(open_for_writing(self.path, self._writer_lock, create=False, writer_lock_held=True))
        self._registered = False
        self._commit_or_recover(group, recovered=True)

    def _fail(self, group: list[Job], error: BaseException) -> None:
        fail(group, translated(error, self.path) or error)

    def _commit(self, group: list[Job]) -> None:
        for job in group:
            job.result = job.error = None  # of an attempt that was rolled back
        driver = self._driver()
        driver.execute("BEGIN IMMEDIATE")
        try:
            now = time.time()
            batch = Batch(driver, self._identity.writer_id, now, self._shortage(now))
            self._registered = self._identity.register(driver, batch.now, known=self._registered)
            for operation, jobs in itertools.groupby(group, key=lambda job: job.operation):
                operation(batch, list(jobs))
            if any(job.error is None for job in group):
                self._files.check()
            driver.execute("COMMIT")
            self._dirty = True
        except BaseException:
            self._registered = False
            # SQLite may have rolled back by itself, as it does on a full disk.
            if driver.in_transaction:
                driver.execute("ROLLBACK")
            raise

    def _shortage(self, now: float) -> str:
        # The floor is far above what is written between two looks.
        if self._shortage_seen is None or not 0 <= now - self._shortage_seen[0] < SHORTAGE_SECONDS:
            disk = os.statvfs(self.path.parent)
            free, floor = disk.f_bavail * disk.f_frsize, self._limits.free_space_floor
            text = (
                f"{free:,} bytes are free beside {self.path}, fewer than the floor of {floor:,}. "
                "Free some disk space, and writes resume automatically; or lower the floor (--free-space-floor)."
            )
            self._shortage_seen = now, text if free < floor else ""
        return self._shortage_seen[1]

    def _driver(self) -> Any:
        """The driver's connection: SQLAlchemy opens and configures it, statements go past its cost."""
        assert self._connection is not None
        return self._connection.connection.driver_connection

    def _raw(self, statement: str) -> Any:
        return self._driver().execute(statement).fetchone()

    def _checkpoint(self, *, idle: bool) -> None:
        size = wal_bytes(self.path)
        if idle or size > TRUNCATE_BYTES:
            if size:
                with self._writer_lock:
                    self._run_checkpoint("TRUNCATE")
            # What a reader pins is tried again until it has left.
            self._dirty = bool(size) and self._pinned
        elif size > max(CHECKPOINT_BYTES, self._moved):
            with self._writer_lock:
                self._run_checkpoint("PASSIVE")

    def _run_checkpoint(self, mode: str) -> None:
        # Without waiting: readers may hold the log for long, and the writer lock must not be kept from others.
        self._raw("PRAGMA busy_timeout = 0")
        try:
            busy, pages, done = self._raw(f"PRAGMA wal_checkpoint({mode})")
        finally:
            self._raw("PRAGMA busy_timeout = 10000")
        self._pinned = bool(busy) or done < pages
        if not self._pinned:
            self._pin_reported = False
            # It is written over from its start now, and grows past this size only when all of it is new.
            self._moved = wal_bytes(self.path)
        elif not self._pin_reported and wal_bytes(self.path) > CHECKPOINT_BYTES:
            self._pin_reported = True
            warn(
                f"{self.path}-wal has grown to {wal_bytes(self.path):,} bytes: a reader pins the WAL. "
                "Find the process that keeps a transaction open on this database, and end it.",
                PinnedWalWarning,
            )
