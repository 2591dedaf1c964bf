"""The connections on which one process reads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar, TypeVarTuple

from sqlalchemy import Connection, event, text
from sqlalchemy.ext.asyncio import AsyncConnection

from token_id_capture.store.driver import Execute
from token_id_capture.store.file import forking
from token_id_capture.store.file.connections import reading_engine

_CLOSE_SECONDS: Final = 10.0

_Given = TypeVarTuple("_Given")
_Found = TypeVar("_Found")


class Reader:
    """Read-only connections to one database, one of which is kept for the next read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._engine = reading_engine(path)
        self._open: list[Any] = []
        self._in_use = 0
        self._first = threading.Lock()
        self._begun = False
        # Held across a fork, so that no read begins meanwhile.
        self._turn = threading.Lock()
        event.listen(self._engine.sync_engine, "connect", self._opened)
        event.listen(self._engine.sync_engine, "close", self._gone)
        forking.watch(self)

    def _opened(self, connection: Any, record: Any) -> None:
        self._open.append(connection)

    def _gone(self, connection: Any, record: Any) -> None:
        if connection in self._open:
            self._open.remove(connection)

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[AsyncConnection]:
        """A connection in a transaction of its own."""
        with self._turn:
            self._in_use += 1
        try:
            if not self._begun:
                await asyncio.to_thread(self._begin)
            async with self._engine.connect() as connection:
                yield connection
        finally:
            with self._turn:
                self._in_use -= 1

    async def ask(self, query: Callable[[Execute, *_Given], _Found], *given: *_Given) -> _Found:
        """What a query of ``queries`` or ``listing`` answers; all its statements see one state."""

        def run(connection: Connection) -> _Found:
            # Text of SQLAlchemy, whose named parameters every database takes.
            return query(lambda statement, parameters: connection.execute(text(statement), parameters), *given)

        async with self.connect() as connection:
            return await connection.run_sync(run)

    def _begin(self) -> None:
        # SQLAlchemy makes its first connection under a lock of one event loop, and others may come at once.
        with self._first:
            if not self._begun:
                asyncio.run(self._connect_once())
                self._begun = True

    async def _connect_once(self) -> None:
        async with self._engine.connect():
            pass

    async def close(self) -> None:
        """Close the connection that is kept."""
        await self._engine.dispose()

    def close_for_fork(self) -> bool:
        """Close the connection that is kept; False if a read is under way."""
        self._turn.acquire()
        if self._in_use:
            return False
        for connection in self._open:
            # Not close(), which only an event loop can wait for. It came with aiosqlite 0.22.1.
            if not hasattr(connection.driver_connection, "stop"):
                return False
            connection.driver_connection.stop()
            connection.driver_connection._thread.join(_CLOSE_SECONDS)
        self._open.clear()
        self._engine.sync_engine.dispose(close=False)
        return True

    def go_on_after_fork(self) -> None:
        """Reads may begin again."""
        self._turn.release()
