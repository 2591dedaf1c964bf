"""What a database system gives to the store: a writer, readers and a stamp, each opened on first use."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar, TypeVarTuple

from token_id_capture.errors import StoreClosedError
from token_id_capture.store.driver import Execute
from token_id_capture.store.read.tokens import RowReader
from token_id_capture.store.server_url import ServerUrl
from token_id_capture.store.write.queue import Operation
from token_id_capture.store.write.thread import Limits, WriterThread

_Given = TypeVarTuple("_Given")
_Found = TypeVar("_Found")

# What a forked child inherits is kept alive here: there is nothing in it that the child could close.
_inherited: list[Any] = []


class Stamp(Protocol):
    """The weight version that a trainer has stamped, for every process of a database."""

    def read(self) -> str | None:
        """The version that is stamped now; None if there is none. Takes microseconds."""
        ...

    def write(self, version: str | None) -> None:
        """Stamp what is captured from now on, or stop it. Blocks.

        Raises:
            OSError: it cannot be stored.
        """
        ...


class Backend(ABC):
    """One database. Safe to use from loops in several threads, and after a fork."""

    weights: Stamp

    def __init__(self, location: Path | ServerUrl, limits: Limits) -> None:
        self.location = location
        self.limits = limits
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        # Loops in several threads may come at once, and there is one writer for them all.
        self._opening = threading.Lock()
        self._writer: WriterThread | None = None

    @property
    @abstractmethod
    def file_id(self) -> str | None:
        """What tells this database from every other; None before the first open."""

    @abstractmethod
    async def read(self, query: Callable[[Execute, *_Given], _Found], *given: *_Given) -> _Found:
        """What a query of ``queries`` or ``listing`` answers."""

    @abstractmethod
    async def read_tokens(self, work: Callable[[RowReader, *_Given], _Found], *given: *_Given) -> _Found:
        """What ``work`` makes of the rows that it reads, all of it in one thread."""

    @abstractmethod
    async def close_readers(self) -> None:
        """Close every connection that reads, and open none any more."""

    @abstractmethod
    def log_bytes(self) -> int:
        """The size of the log beside the database, in bytes; 0 where there is none."""

    @abstractmethod
    def _new_writer(self, predecessor: WriterThread | None) -> WriterThread:
        """A writer that is not started yet."""

    @abstractmethod
    def _inherited_connections(self) -> tuple[Any, ...]:
        """What reads, to be left alone in a forked child."""

    async def write(self, operation: Operation, payload: Any, size: int) -> Any:
        """Do this, and return its result once it is durable."""
        return await self.live_writer().submit(operation, payload, size)

    def live_writer(self) -> WriterThread:
        """The writer, started if need be."""
        self.check_process()
        with self._opening:
            self._check_open()
            if self._writer is None or not self._writer.alive:
                self._writer = self._new_writer(self._writer)
                self._writer.start()
            return self._writer

    def check_process(self) -> bool:
        """Notice a fork: whether there was one since the last look.

        Raises:
            StoreClosedError: the store was closed.
        """
        forked = self._pid != os.getpid()
        if forked:
            _inherited.append((self._writer, *self._inherited_connections()))
            self._reset()
        self._check_open()
        return forked

    def waiting(self) -> tuple[int, int]:
        """How many writes of this process wait for the writer, and their bytes."""
        return (0, 0) if self._writer is None else self._writer.waiting

    def unclosed(self) -> WriterThread | None:
        """The writer of this process, if it still takes work."""
        writer = self._writer
        return writer if writer is not None and writer.alive and self._pid == os.getpid() else None

    async def close(self) -> None:
        """Finish what waits, then close. Idempotent."""
        if self._pid != os.getpid():
            _inherited.append((self._writer, *self._inherited_connections()))
            self._reset()
        with self._opening:
            self._closed = True
            writer, self._writer = self._writer, None
        await self.close_readers()
        if writer is not None:
            await writer.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"the store on {self.location} is closed: open a new one")
