"""The connections on which one process reads tokens.

Rows of tokens are large and have to be unpacked, which takes a thread anyway. So a read is one visit
to a thread, from the statement to the unpacked calls. Through an asynchronous connection each step of
it would be a visit, and 64 snapshots that are read at once took four times as long.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from token_id_capture.store.driver import Execute
from token_id_capture.store.file import forking
from token_id_capture.store.file.open_files import Identity, identity
from token_id_capture.store.file.read_only import connect, transaction

_Given = TypeVarTuple("_Given")
_Found = TypeVar("_Found")


class TokenReader:
    """Read-only connections to one database, one of which is kept for the next read.

    A read blocks its thread, and has a connection to itself. None continues with a file that was
    removed or replaced since. Errors are those of the driver.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept: tuple[sqlite3.Connection, Identity] | None = None
        self._in_use = 0
        self._closed = False
        # Held across a fork, so that no read begins meanwhile.
        self._turn = threading.Lock()
        forking.watch(self)

    def read(self, query: Callable[[Execute, *_Given], _Found], *given: *_Given) -> _Found:
        """What a query of ``queries`` or ``listing`` answers; all its statements see one state."""
        with self.connection() as connection, transaction(connection):
            return query(connection.execute, *given)

    @contextmanager
    def connection(self) -> Iterator[sqlite3.Connection]:
        """A connection that nobody else uses meanwhile."""
        # Before it is opened: should it be replaced in between, the next read opens it once more.
        file = identity(f"{self.path}")
        connection: sqlite3.Connection | None = None
        with self._turn:
            self._in_use += 1
            if self._kept is not None and self._kept[1] != file:
                self._close_kept()
            if self._kept is not None:
                (connection, _), self._kept = self._kept, None
        try:
            if connection is None:
                connection = connect(self.path, check_same_thread=False)
            yield connection
        finally:
            with self._turn:
                self._in_use -= 1
                if connection is not None and self._kept is None and not self._closed:
                    self._kept = connection, file
                elif connection is not None:
                    connection.close()

    def close(self) -> None:
        """Close the connection that is kept, and keep none from now on."""
        with self._turn:
            self._closed = True
            self._close_kept()

    def close_for_fork(self) -> bool:
        """Close the connection that is kept; False if a read is under way."""
        self._turn.acquire()
        self._close_kept()
        return not self._in_use

    def go_on_after_fork(self) -> None:
        """Reads may begin again."""
        self._turn.release()

    def _close_kept(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            kept[0].close()
