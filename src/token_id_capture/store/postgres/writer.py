"""The thread of a process that writes to a server: what waits is one transaction, as it is with a file.

When the connection is lost, the group is done again, for as long as callers are asked to be patient. If it was lost
while a commit was under way, nobody is told anything before the database was asked: each transaction writes its
number into the writer's own row, so the row tells whether that transaction was committed. The look waits for a
transaction that still runs, as it wants the same row.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from dataclasses import replace
from typing import Any, Final

from token_id_capture.errors import ReplacedDatabaseError, StoreError, UnusableDatabaseError
from token_id_capture.store.postgres.connection import ServerConnection
from token_id_capture.store.postgres.errors import is_gone, is_undone, translated
from token_id_capture.store.postgres.locks import lock_rollouts
from token_id_capture.store.postgres.migrate import migrate
from token_id_capture.store.postgres.session import check_server, connect, file_id_of
from token_id_capture.store.postgres.weight_version import REFRESH_SECONDS, WeightVersionRow
from token_id_capture.store.server_url import ServerUrl
from token_id_capture.store.write.entries import Call, Mark
from token_id_capture.store.write.queue import Batch, Job, Operation, resolve
from token_id_capture.store.write.thread import Limits, WriterThread, fail

logger = logging.getLogger(__name__)

PATIENCE_SECONDS: Final = 30.0
"""How long a group is tried again before its callers get an error."""

HEARTBEAT_SECONDS: Final = 10.0
"""How often a process that has nothing to write says that it lives."""


class ServerAwayError(StoreError):
    """The server did not answer for as long as callers are asked to be patient."""


_SHORTEST_PAUSE_SECONDS: Final = 0.05
_LONGEST_PAUSE_SECONDS: Final = 1.0

# One message. A host that lost its power would otherwise keep its locks for hours.
_BEGIN: Final = b"""
    BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
    SET LOCAL lock_timeout = '30s'; SET LOCAL idle_in_transaction_session_timeout = '30s';
    SELECT current_setting('synchronous_commit'), (SELECT version FROM weight_version)
"""
_WEIGHTS: Final = "SELECT (SELECT version FROM weight_version)"
_NUMBER: Final = """
    INSERT INTO writers (writer_id, pid, host, boot_id, started_at, last_seen_at, committed)
    VALUES (:writer_id, :pid, :host, :boot_id, :started_at, extract(epoch FROM clock_timestamp()), :number)
    ON CONFLICT (writer_id) DO UPDATE SET last_seen_at = excluded.last_seen_at, committed = {committed}
    RETURNING committed
"""
_RAISE_NUMBER: Final = _NUMBER.format(committed="excluded.committed")
_KEEP_NUMBER: Final = _NUMBER.format(committed="writers.committed")


class DatabaseIdentity:
    """Which database this store has worked with, so that it never continues with another one of the same name."""

    def __init__(self, url: ServerUrl, file_id: str | None) -> None:
        self.url = url
        self.file_id = file_id

    def recognise(self, connection: ServerConnection) -> None:
        """Remember the database at the first look, and compare from then on.

        Raises:
            ReplacedDatabaseError: it is another one.
        """
        found = file_id_of(connection, self.url)
        if self.file_id not in (None, found):
            raise ReplacedDatabaseError(
                f"{self.url} was replaced while it was in use, so nothing is acknowledged or read any more: what is "
                "there now lacks calls that were stored before. Start again to use it, and run the rollouts that were "
                "open under new ids."
            )
        self.file_id = found


class PostgresWriter(WriterThread):
    """Owns the writing connection of one process to one database on a server."""

    def __init__(
        self,
        database: DatabaseIdentity,
        weights: WeightVersionRow,
        limits: Limits,
        *,
        create: bool,
        predecessor: WriterThread | None = None,
    ) -> None:
        super().__init__(database.url.shown, limits, predecessor)
        self._database = database
        self._url = database.url
        self._create = create
        self._weights = weights
        self._connection: ServerConnection | None = None
        self._number = 0
        self._unanswered: int | None = None
        self._away_since: float | None = None
        self._beaten_at = time.monotonic()

    async def submit(self, operation: Operation, payload: Any, size: int = 1024) -> Any:
        """As ``WriterThread`` has it. Particulars are for people, and PostgreSQL's text has no NUL character."""
        if isinstance(payload, Mark | Call) and "\0" in payload.detail:
            payload = replace(payload, detail=payload.detail.replace("\0", "\ufffd"))
        return await super().submit(operation, payload, size)

    def _run(self) -> None:
        try:
            self._follow_predecessor()
            self._connect(create=self._create)
            while self._queue.wait(REFRESH_SECONDS):
                group = self._queue.take()
                if group:
                    self._serve(group)
                    resolve(group)
                else:
                    self._idle()
        except BaseException as error:
            self.failure = translated(error, self._url) or error
            if self._connection is not None:
                logger.error("the writer of %s ended: %s", self._url, self.failure)
        finally:
            self._stop_taking()
            self._disconnect()

    def _connect(self, *, create: bool = False) -> ServerConnection:
        if self._connection is None:
            connection = connect(self._url)
            try:
                check_server(connection, self._url)
                migrate(connection, self._url, create=create)
                self._database.recognise(connection)
                self._write_number(connection, _KEEP_NUMBER)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.close()

    def _write_number(self, connection: ServerConnection, statement: str) -> int:
        """Write this process's row; the answer is the number of its latest transaction that was committed."""
        own = self._identity
        values = {"writer_id": own.writer_id, "pid": own.pid, "host": own.host, "boot_id": own.boot_id}
        parameters = {**values, "started_at": own.started_at, "number": self._number}
        self._beaten_at = time.monotonic()
        return int(connection.one(statement, parameters)[0])

    def _idle(self) -> None:
        """Look at the weight version, and now and then say that this process lives."""
        try:
            connection, now = self._connect(), time.monotonic()
            self._weights.see(now, connection.one(_WEIGHTS)[0])
            if now - self._beaten_at >= HEARTBEAT_SECONDS:
                self._write_number(connection, _KEEP_NUMBER)
        except UnusableDatabaseError:
            raise
        except Exception as error:
            # Nobody waits for it: the next one, or the next group, connects again.
            logger.warning("%s does not answer: %s", self._url, translated(error, self._url) or error)
            self._disconnect()

    def _serve(self, group: list[Job]) -> None:
        """Commit a group, or give each of its jobs an error."""
        try:
            self._commit_patiently(group)
        except UnusableDatabaseError as error:
            # Before the callers know, so that one who tries again finds a new writer.
            self.failure = error
            self._queue.close()
            fail(group, error)
            resolve(group)
            raise
        except Exception as error:
            if len(group) > 1 and not isinstance(error, ServerAwayError):
                # All of it was rolled back. One that fails must not take its neighbours with it.
                for half in (group[: len(group) // 2], group[len(group) // 2 :]):
                    self._serve(half)
            else:
                fail(group, translated(error, self._url) or error)

    def _commit_patiently(self, group: list[Job]) -> None:
        pause = _SHORTEST_PAUSE_SECONDS
        while True:
            try:
                connection = self._connect()
                if not self._was_committed(connection):
                    self._commit(connection, group)
                self._away_since = None
                return
            except Exception as error:
                if is_gone(error) or (self._connection is not None and not self._connection.usable):
                    self._disconnect()
                elif not is_undone(error):
                    raise
                # Who comes while the server is away has no more patience than who noticed it.
                self._away_since = self._away_since or time.monotonic()
                if time.monotonic() + pause > self._away_since + PATIENCE_SECONDS:
                    raise self._given_up(error) from error
                logger.warning("trying again on %s: %s", self._url, translated(error, self._url) or error)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _given_up(self, error: Exception) -> ServerAwayError:
        unknown, self._unanswered = self._unanswered is not None, None
        what = "whether this was stored is not known" if unknown else "nothing was stored"
        return ServerAwayError(
            f"{translated(error, self._url) or error}. For {PATIENCE_SECONDS:.0f} s it was tried again, and {what}: "
            "check the server, then repeat it"
        )

    def _was_committed(self, connection: ServerConnection) -> bool:
        """Whether the transaction was committed whose commit was not answered; false if there is none."""
        if self._unanswered is None:
            return False
        committed = self._write_number(connection, _KEEP_NUMBER) == self._unanswered
        self._unanswered = None
        return committed

    def _commit(self, connection: ServerConnection, group: list[Job]) -> None:
        for job in group:
            job.result = job.error = None  # of an attempt that was rolled back
        self._number += 1
        try:
            self._begin(connection)
            self._write_number(connection, _RAISE_NUMBER)
            batch = Batch(connection, self.writer_id, time.time(), shortage="")
            lock_rollouts(batch, group)
            for operation, jobs in itertools.groupby(group, key=lambda job: job.operation):
                operation(batch, list(jobs))
            self._unanswered = self._number
            answer = connection.execute("COMMIT").statusmessage
            if answer != "COMMIT":
                raise StoreError(f"{self._url} answered {answer} to a commit")
        except BaseException:
            if connection.usable:
                # What was answered is known: it was rolled back.
                self._unanswered = None
                with contextlib.suppress(Exception):
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
            raise
        self._unanswered = None

    def _begin(self, connection: ServerConnection) -> None:
        now = time.monotonic()
        cursor = connection.raw.execute(_BEGIN)
        while cursor.nextset():
            pass
        row = cursor.fetchone()
        if row is None or row[0] == "off":
            # A pooler may hand over a session in which somebody else turned it off.
            raise UnusableDatabaseError(f"{self._url}: synchronous_commit was turned off there; turn it on")
        self._weights.see(now, row[1])
