"""What a page asks for, read in threads, a few at a time, each for as short as it can be."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from token_id_capture.errors import UnusableDatabaseError
from token_id_capture.report.model import LinesPage, Vocabulary
from token_id_capture.report.page import as_json
from token_id_capture.report.reading import read_lines, read_overview, read_rollout
from token_id_capture.report.records import Told
from token_id_capture.store.read.newest import Wanted
from token_id_capture.store.read.token_connections import TokenReader

LINES: Final = 200
"""Rollouts in one answer."""

_AT_ONCE: Final = 2
_LONGEST_SECONDS: Final = 3.0
_STEPS: Final = 20_000
_FRESH_SECONDS: Final = 0.5
_REST: Final = 20
"""The plots of very many rollouts take seconds. They are made again after so many times as long."""

_Found = TypeVar("_Found")


class Reads:
    """The answers as JSON. Those who ask for the same thing at once share one read."""

    def __init__(
        self, path: Path, told: Mapping[str, Told], vocabulary: Vocabulary | None, changes: Callable[[str], int]
    ) -> None:
        """``changes`` counts what is known to have changed of a rollout."""
        self._path = path
        self._told = told
        self._vocabulary = vocabulary
        self._reader = TokenReader(path)
        self._few = asyncio.Semaphore(_AT_ONCE)
        self._changes = changes
        self._shared: dict[str, _Shared] = {}

    async def lines(self, wanted: Wanted, before: int | None) -> bytes:
        """The next rollouts, the last opened first.

        Raises:
            TimeoutError: a rare condition is looked for among too many rollouts.
        """

        def read(connection: sqlite3.Connection) -> LinesPage:
            found = _cut_off(connection, lambda: read_lines(connection, self._told, LINES, before, wanted))
            return LinesPage(found, len(found) == LINES)

        return as_json(await self._read(read))

    async def rollout(self, rollout_id: str) -> bytes:
        """One rollout.

        Raises:
            UnknownRolloutError: it is not in the database.
            CorruptCaptureError: a call is damaged.
        """
        return await self._share(
            rollout_id, self._changes(rollout_id), lambda found: read_rollout(found, rollout_id, self._vocabulary)
        )

    async def overview(self) -> bytes:
        """All rollouts together; perhaps as they were some seconds ago."""
        return await self._share("", 0, lambda found: read_overview(found, self._path.name, self._told))

    async def _share(self, name: str, version: int, read: Callable[[sqlite3.Connection], object]) -> bytes:
        """What others asked for, if nothing is known to have changed since they did."""
        now = time.monotonic()
        for key in [key for key, one in self._shared.items() if one.task.done() and one.until < now]:
            del self._shared[key]
        shared = self._shared.get(name)
        if shared is None or shared.version != version:
            shared = self._shared[name] = _Shared(version, asyncio.create_task(self._as_json(read)))
            shared.task.add_done_callback(lambda task: shared.rest(not name))
        # One who leaves must not end the read of the others.
        return await asyncio.shield(shared.task)

    async def _as_json(self, read: Callable[[sqlite3.Connection], object]) -> bytes:
        return await self._read(lambda connection: as_json(read(connection)))

    async def _read(self, read: Callable[[sqlite3.Connection], _Found]) -> _Found:
        def run() -> _Found:
            with self._reader.connection() as connection:
                return read(connection)

        async with self._few:
            try:
                return await asyncio.to_thread(run)
            except sqlite3.Error as error:
                raise UnusableDatabaseError(f"{self._path} cannot be read: {error}") from error

    def close(self) -> None:
        """Close the connection that is kept."""
        self._reader.close()


@dataclass(slots=True)
class _Shared:
    """An answer for all who ask for it, until some time (of the monotonic clock)."""

    version: int
    task: asyncio.Task[bytes]
    began: float = field(default_factory=time.monotonic)
    until: float = 0.0

    def rest(self, long: bool) -> None:
        ended = time.monotonic()
        failed = self.task.cancelled() or self.task.exception() is not None
        self.until = 0.0 if failed else ended + max(_FRESH_SECONDS, _REST * (ended - self.began) if long else 0.0)


def _cut_off(connection: sqlite3.Connection, read: Callable[[], _Found]) -> _Found:
    """Run a statement that must not hold a state of the database for long."""
    end = time.monotonic() + _LONGEST_SECONDS
    connection.set_progress_handler(lambda: time.monotonic() > end, _STEPS)
    try:
        return read()
    except sqlite3.OperationalError as error:
        if time.monotonic() > end:
            raise TimeoutError("too many rollouts to look at: ask for fewer conditions, or use tokcap ls") from error
        raise
    finally:
        connection.set_progress_handler(None, 0)
