"""What has changed in a database, looked for once for all who watch.

While somebody watches, ``PRAGMA data_version`` is asked twice a second, which reads one number from shared memory. Only
where that has changed does one short transaction ask for the rollouts behind the last row of each table; what it costs
depends on what has changed and not on what is stored. A watcher that does not listen holds at most one line a rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final

from token_id_capture.errors import TokenCaptureError
from token_id_capture.lifecycle import State
from token_id_capture.report.listing import lines
from token_id_capture.report.model import RolloutLine
from token_id_capture.report.page import as_json
from token_id_capture.report.records import Told
from token_id_capture.store.file.read_only import transaction
from token_id_capture.store.read.newest import Marks, changed_since, marks, rollouts_of
from token_id_capture.store.read.token_connections import TokenReader

_EVERY_SECONDS: Final = 0.5
_HEARTBEAT_SECONDS: Final = 15.0
_CLOCKS_DIFFER_SECONDS: Final = 5.0

_logger = logging.getLogger(__name__)


class Watcher:
    """One who watches: the lines that it has not been told yet, by rollout, and the trouble there is."""

    def __init__(self) -> None:
        self.pending: dict[str, RolloutLine] = {}
        self.trouble = ""
        self.woken = asyncio.Event()

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events: ``rollouts`` with lines, ``trouble`` with a sentence; comments keep proxies awake."""
        yield b": follows\n\n"
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.woken.wait(), _HEARTBEAT_SECONDS)
            self.woken.clear()
            told, self.pending = list(self.pending.values()), {}
            trouble, self.trouble = self.trouble, ""
            if trouble:
                yield b"event: trouble\ndata: %s\n\n" % as_json(trouble)
            yield b"event: rollouts\ndata: %s\n\n" % as_json(told) if told else b": still here\n\n"


class Follower:
    """Follows one database for all watchers; without one it does nothing."""

    def __init__(self, path: Path, told: Mapping[str, Told]) -> None:
        self._reader = TokenReader(path)
        self._told = told
        self._watchers: set[Watcher] = set()
        self._starting = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._connection: sqlite3.Connection | None = None
        self._version = 0
        self._marks: Marks = {}
        self._looked_at = 0.0
        self._running: dict[str, RolloutLine] = {}
        self._changes: Counter[str] = Counter()

    def changes_of(self, rollout_id: str) -> int:
        """How often a rollout was told to have changed."""
        return self._changes[rollout_id]

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[Watcher]:
        """A watcher that is told of all that changes from now on."""
        watcher = Watcher()
        async with self._starting:
            if self._task is None:
                self._connection, self._running = None, {}
                # Where it fails, the next look begins anew.
                _, watcher.trouble = await self._try_to_look()
                if watcher.trouble:
                    watcher.woken.set()
                self._task = asyncio.create_task(self._follow())
            self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)

    async def _follow(self) -> None:
        try:
            while self._watchers:
                await asyncio.sleep(_EVERY_SECONDS)
                self._tell(*await self._try_to_look())
        finally:
            self._task = None

    async def _try_to_look(self) -> tuple[tuple[RolloutLine, ...], str]:
        """What has changed since the last look, or the trouble that kept it from being read."""
        try:
            return await asyncio.to_thread(self._look), ""
        except (TokenCaptureError, sqlite3.Error, OSError) as error:
            _logger.warning("the database cannot be read: %s", error)
            return (), f"the database cannot be read: {error}"

    def _tell(self, found: tuple[RolloutLine, ...], trouble: str) -> None:
        self._changes.update(line.id for line in found)
        for watcher in self._watchers if found or trouble else ():
            watcher.pending.update((line.id, line) for line in found)
            watcher.trouble = trouble
            watcher.woken.set()

    def _look(self) -> tuple[RolloutLine, ...]:
        """The lines of rollouts that have changed since the last look; none at the first one."""
        with self._reader.connection() as connection:
            first = connection is not self._connection
            version = int(connection.execute("PRAGMA data_version").fetchone()[0])
            if not first and version == self._version:
                return ()
            self._connection, self._version = connection, version
            since, self._looked_at = self._looked_at - _CLOCKS_DIFFER_SECONDS, time.time()
            with transaction(connection):
                now = marks(connection.execute)
                changed = frozenset[str]() if first else changed_since(connection.execute, self._marks, since)
                # A row that is changed in place is one of a rollout that was running.
                looked_at = changed.union(self._running)
                self._marks = now
                found = lines(rollouts_of(connection.execute, looked_at), self._told) if looked_at else ()
        told = tuple(line for line in found if line.id in changed or line != self._running.get(line.id))
        self._running = {line.id: line for line in found if line.state is State.OPEN and line.open_calls}
        return told

    async def close(self) -> None:
        """Stop following."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._reader.close()
