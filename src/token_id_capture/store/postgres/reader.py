"""The connections on which one process reads from a server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar, TypeVarTuple

import psycopg

from token_id_capture.store.driver import Execute
from token_id_capture.store.postgres.connection import ServerConnection
from token_id_capture.store.postgres.errors import is_gone
from token_id_capture.store.postgres.session import connect
from token_id_capture.store.postgres.writer import PATIENCE_SECONDS, DatabaseIdentity

_KEPT: Final = 4
_PAUSE_SECONDS: Final = 0.2

_Given = TypeVarTuple("_Given")
_Found = TypeVar("_Found")


class PostgresReader:
    """Connections to one database, some of which are kept for the next reads. A read blocks its thread."""

    def __init__(self, database: DatabaseIdentity) -> None:
        self._database = database
        self._kept: list[ServerConnection] = []
        self._lock = threading.Lock()
        self._closed = False

    def read(self, query: Callable[[Execute, *_Given], _Found], *given: *_Given) -> _Found:
        """What a query of ``queries`` or ``listing`` answers; all its statements see one state.

        A read changes nothing, so one that loses its connection is done again, for as long as a write would be.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        opened_before = self._database.file_id is not None
        while True:
            try:
                with self._connection() as connection, connection.reading():
                    return query(connection.execute, *given)
            except psycopg.Error as error:
                if not (opened_before and is_gone(error)) or time.monotonic() > deadline:
                    raise
            time.sleep(_PAUSE_SECONDS)

    @contextmanager
    def _connection(self) -> Iterator[ServerConnection]:
        with self._lock:
            connection = self._kept.pop() if self._kept else None
        fresh = connection is None
        connection = connection or connect(self._database.url)
        try:
            if fresh:
                self._database.recognise(connection)
            yield connection
        finally:
            with self._lock:
                keep = connection.usable and not self._closed and len(self._kept) < _KEPT
                if keep:
                    self._kept.append(connection)
            if not keep:
                connection.close()

    def close(self) -> None:
        """Close what is kept, and keep none from now on."""
        with self._lock:
            self._closed = True
            kept, self._kept = self._kept, []
        for connection in kept:
            connection.close()
