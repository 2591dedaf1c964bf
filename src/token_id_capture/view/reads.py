"""What a page asks for, read in threads, a few at a time, each for as short as it can be."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Mapping
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
"""So long an answer is given to others, who ask for it because of the same change."""

_Found = TypeVar("_Found")


class Reads:
    """The answers as JSON. Those who ask for the same thing at once share one read."""

    def __init__(self, path: Path, told: Mapping[str, Told], vocabulary: Vocabulary | None) -> None:
        self._path = path
        self._told = told
        self._vocabulary = vocabulary
        self._reader = TokenReader(path)
        self._few = asyncio.Semaphore(_AT_ONCE)
        self._shared: dict[str, tuple[float, asyncio.Task[bytes]]] = {}

    async def lines(self, wanted: Wanted, before: int | None) -> bytes:
        """The next rollouts, the last opened first.

        Raises:
            TimeoutError: a rare condition is looked for among too many rollouts.
        """

        def read(connection: sqlite3.Connection) -> LinesPage:
            found = _timed(connection, lambda: read_lines(connection, self._told, LINES, before, wanted))
            return LinesPage(found, len(found) == LINES)

        return as_json(await self._read(read))

    async def rollout(self, rollout_id: str) -> bytes:
        """One rollout.

        Raises:
            UnknownRolloutError: there is no row of it.
            CorruptCaptureError: a call is damaged.
        """
        return await self._share(rollout_id, lambda connection: read_rollout(connection, rollout_id, self._vocabulary))

    async def overview(self) -> bytes:
        """All rollouts together."""
        return await self._share("", lambda connection: read_overview(connection, self._path.name, self._told))

    async def _share(self, name: str, read: Callable[[sqlite3.Connection], object]) -> bytes:
        now = time.monotonic()
        old = [key for key, (at, task) in self._shared.items() if task.done() and now - at > _FRESH_SECONDS]
        for key in old:
            del self._shared[key]
        if name not in self._shared:
            self._shared[name] = now, asyncio.create_task(self._as_json(read))
        # One who leaves must not end the read of the others.
        return await asyncio.shield(self._shared[name][1])

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


def _timed(connection: sqlite3.Connection, read: Callable[[], _Found]) -> _Found:
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
