"""A database on a PostgreSQL server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

import psycopg

from token_id_capture.store.backend import Backend
from token_id_capture.store.driver import Execute
from token_id_capture.store.postgres.errors import translated
from token_id_capture.store.postgres.reader import PostgresReader
from token_id_capture.store.postgres.weight_version import WeightVersionRow
from token_id_capture.store.postgres.writer import DatabaseIdentity, PostgresWriter
from token_id_capture.store.read.tokens import RowReader, ask
from token_id_capture.store.server_url import ServerUrl
from token_id_capture.store.write.queue import open_only
from token_id_capture.store.write.thread import Limits, WriterThread

_Given = TypeVarTuple("_Given")
_Found = TypeVar("_Found")


class PostgresServer(Backend):
    """The backend on a server. Its sockets are left alone in a forked child, which opens its own."""

    def __init__(self, url: ServerUrl, limits: Limits, *, create: bool, file_id: str | None) -> None:
        self._identity = DatabaseIdentity(url, file_id)
        self._create = create
        self._weights = WeightVersionRow(url)
        self.weights = self._weights
        super().__init__(url, limits)

    def _reset(self) -> None:
        super()._reset()
        self._reader = PostgresReader(self._identity)

    @property
    def file_id(self) -> str | None:
        """What tells this database from every other."""
        return self._identity.file_id

    def log_bytes(self) -> int:
        """The server looks after its log itself."""
        return 0

    def _new_writer(self, predecessor: WriterThread | None) -> WriterThread:
        return PostgresWriter(self._identity, self._weights, self.limits, create=self._create, predecessor=predecessor)

    def _inherited_connections(self) -> tuple[Any, ...]:
        return (self._reader,)

    async def close_readers(self) -> None:
        """Close the connections that read."""
        self._reader.close()

    async def read(self, query: Callable[[Execute, *_Given], _Found], *given: *_Given) -> _Found:
        """What a query answers."""
        return await self.read_tokens(ask, query, *given)

    async def read_tokens(self, work: Callable[[RowReader, *_Given], _Found], *given: *_Given) -> _Found:
        """What ``work`` makes of the rows that it reads."""
        self.check_process()
        if self.file_id is None:
            # The first read checks that the tables exist and belong to this release.
            await self.write(open_only, None, 0)
        try:
            return await asyncio.to_thread(work, self._reader, *given)
        except psycopg.Error as error:
            raise translated(error, self._identity.url) or error from error
