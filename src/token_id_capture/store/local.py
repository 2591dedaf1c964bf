"""A database in one SQLite file of this machine."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

from sqlalchemy.exc import DBAPIError

from token_id_capture.store.backend import Backend
from token_id_capture.store.driver import Execute
from token_id_capture.store.file import forking
from token_id_capture.store.file.connections import translated
from token_id_capture.store.file.open_files import DatabaseFile
from token_id_capture.store.file.opening import is_current
from token_id_capture.store.file.read_only import wal_bytes
from token_id_capture.store.file.weight_version import WeightVersionFile
from token_id_capture.store.read.connections import Reader
from token_id_capture.store.read.token_connections import TokenReader
from token_id_capture.store.read.tokens import RowReader
from token_id_capture.store.write.queue import open_only
from token_id_capture.store.write.thread import Limits, WriterThread
from token_id_capture.store.write.writer import Writer

_Given = TypeVarTuple("_Given")
_Found = TypeVar("_Found")


class LocalFile(Backend):
    """The backend on a file."""

    def __init__(self, path: Path, limits: Limits, *, create: bool, file_id: str | None) -> None:
        self.path = path
        self._file = DatabaseFile(path, file_id)
        self._create = create
        self.weights = WeightVersionFile(path)
        super().__init__(path, limits)

    def _reset(self) -> None:
        super()._reset()
        self._reader: Reader | None = None
        self._token_reader: TokenReader | None = None

    @property
    def file_id(self) -> str | None:
        """What tells this file from every other, and from its own backups."""
        return self._file.file_id

    def log_bytes(self) -> int:
        """The size of the write-ahead log in bytes."""
        return wal_bytes(self.path)

    def check_process(self) -> bool:
        """As ``Backend`` has it; and the file is still the one that was opened.

        Raises:
            StoreError: this process was forked while the file was being read.
            ReplacedDatabaseError: the file was removed or replaced.
        """
        forked = super().check_process()
        forking.refuse_inherited(self.path)
        self._file.refuse_lost()
        return forked

    def _new_writer(self, predecessor: WriterThread | None) -> WriterThread:
        return Writer(self._file, self.limits, create=self._create, predecessor=predecessor)

    def _inherited_connections(self) -> tuple[Any, ...]:
        return self._reader, self._token_reader

    async def close_readers(self) -> None:
        """Close the connections that read."""
        with self._opening:
            reader, self._reader = self._reader, None
            token_reader, self._token_reader = self._token_reader, None
        if token_reader is not None:
            token_reader.close()
        if reader is not None:
            await reader.close()

    async def read(self, query: Callable[[Execute, *_Given], _Found], *given: *_Given) -> _Found:
        """What a query answers, on a connection of the event loop."""
        try:
            reader = await self.live_reader()
            return await reader.ask(query, *given)
        except DBAPIError as error:
            raise translated(error, self.path) or error from error

    async def live_reader(self) -> Reader:
        """The connections of ``read``."""
        await self._prepare_for_reading()
        with self._opening:
            self._check_open()
            self._reader = self._reader or Reader(self.path)
            return self._reader

    async def read_tokens(self, work: Callable[[RowReader, *_Given], _Found], *given: *_Given) -> _Found:
        """What ``work`` makes of the rows that it reads."""
        await self._prepare_for_reading()
        with self._opening:
            self._check_open()
            reader = self._token_reader = self._token_reader or TokenReader(self.path)
        try:
            return await asyncio.to_thread(work, reader, *given)
        except sqlite3.Error as error:
            raise translated(error, self.path) or error from error

    async def _prepare_for_reading(self) -> None:
        self.check_process()
        self._file.check()
        if self._reader or self._token_reader or self._writer:
            return
        # A file that is up to date is read without taking the writer lock.
        if not is_current(self.path, create=self._create):
            await self.write(open_only, None, 0)
        self._file.see()
