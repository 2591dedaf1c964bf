"""The upstreams of a server whose workers are several processes: a file that they share for as long as it runs."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import orjson

from token_id_capture.errors import ConfigurationError
from token_id_capture.server.http.monitor import Watcher
from token_id_capture.server.upstreams.pool import Upstreams

_logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 1.0


class SharedList:
    """A JSON list of addresses in a file; without a file it belongs to this process alone."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._seen: int | None = None

    def changed(self) -> list[str] | None:
        """The list, if another process has changed it since the last time; else None. Blocks for microseconds."""
        try:
            if self._path is None or (when := self._path.stat().st_mtime_ns) == self._seen:
                return None
            found: list[str] = orjson.loads(self._path.read_bytes())
        except (OSError, orjson.JSONDecodeError):
            return None
        self._seen = when
        return found

    def write(self, addresses: list[str]) -> None:
        """Tell the other processes. Blocks.

        Raises:
            OSError: it cannot be written.
        """
        if self._path is not None:
            temporary = self._path.with_name(f"{self._path.name}.new")
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as stream:
                stream.write(orjson.dumps(addresses))
            temporary.replace(self._path)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Only one process changes the list at a time. Blocks."""
        if self._path is None:
            yield
            return
        with open(self._path.with_name(f"{self._path.name}.lock"), "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


class Watch(Watcher):
    """Follows the shared list, and asks the engines how they are where there are several."""

    def __init__(self, upstreams: Upstreams, shared: SharedList) -> None:
        self._upstreams = upstreams
        self._shared = shared

    async def _run(self) -> None:
        while True:
            try:
                await self.look()
            except ConfigurationError as error:
                _logger.error("the list of upstreams cannot be read: %s", error)
            await asyncio.sleep(_LOOK_SECONDS)

    async def look(self) -> None:
        """Look once."""
        addresses = self._shared.changed()
        if addresses is not None:
            await self._upstreams.follow(addresses)
        if len(self._upstreams.members) > 1:
            await self._upstreams.look()
