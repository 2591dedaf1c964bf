"""Whether a gateway can serve: its database can be written, and something listens at the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Final, Protocol

from token_id_capture.errors import ReplacedDatabaseError, StorageFullError, StoreError
from token_id_capture.protocols import TokenSink, offers

CACHE_SECONDS: Final = 1.0
PROBE_SECONDS: Final = 2.0

_logger = logging.getLogger(__name__)


class Why(StrEnum):
    """What keeps a gateway from serving."""

    NO_SPACE = "no_space"
    """The disk has less room than the free-space floor; calls are served again when there is more."""
    FILE_REPLACED = "file_replaced"
    """The database was removed or replaced while it was in use; only a restart helps."""
    NOT_WRITABLE = "not_writable"
    UNREACHABLE = "unreachable"
    NO_ANSWER = "no_answer"


class WatchedSink(Protocol):
    """A sink that says how it is; the store does."""

    async def check_writable(self) -> None:
        """Return once a write would succeed now.

        Raises:
            StoreError: it would fail; the message says why.
        """
        ...

    def waiting(self) -> tuple[int, int]:
        """How many writes of this process wait, and their bytes."""
        ...

    def wal_bytes(self) -> int:
        """The size of the write-ahead log in bytes."""
        ...


class Readiness:
    """Asks the sink and the engine, at most once in ``CACHE_SECONDS`` however often it is asked.

    ``reach`` connects to the engine, and raises where it can't. Reasons are logged in full as they change,
    and told as a word of ``Why``: who may ask is anybody.
    """

    def __init__(self, sink: TokenSink | None, reach: Callable[[], Awaitable[None]]) -> None:
        self._sink = sink
        self._reach = reach
        self._lock = asyncio.Lock()
        self._asked_at = float("-inf")
        self._problems: dict[str, Exception] = {}

    async def problems(self) -> dict[str, Why]:
        """What is not ready, and why: some of ``database`` and ``upstream``, or nothing."""
        loop = asyncio.get_running_loop()
        async with self._lock:
            if loop.time() - self._asked_at >= CACHE_SECONDS:
                found = await self._ask()
                self._asked_at = loop.time()
                self._report(found)
                self._problems = found
        return {name: _why(error) for name, error in self._problems.items()}

    async def _ask(self) -> dict[str, Exception]:
        checks = {"upstream": self._reach}
        if offers(self._sink, WatchedSink):
            checks["database"] = self._sink.check_writable
        answers = await asyncio.gather(*(_problem(check) for check in checks.values()))
        return {name: problem for name, problem in zip(checks, answers, strict=True) if problem}

    def _report(self, found: dict[str, Exception]) -> None:
        for name in found.keys() - self._problems.keys():
            _logger.warning("not ready: %s: %s", name, str(found[name]) or type(found[name]).__name__)
        for name in self._problems.keys() - found.keys():
            _logger.warning("ready again: %s", name)


async def _problem(check: Callable[[], Awaitable[None]]) -> Exception | None:
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            await check()
    except TimeoutError:
        return TimeoutError(f"no answer in {PROBE_SECONDS:g} s")
    except Exception as error:
        return error
    return None


def _why(error: Exception) -> Why:
    if isinstance(error, StorageFullError):
        return Why.NO_SPACE
    if isinstance(error, ReplacedDatabaseError):
        return Why.FILE_REPLACED
    if isinstance(error, TimeoutError):
        return Why.NO_ANSWER
    return Why.NOT_WRITABLE if isinstance(error, StoreError) else Why.UNREACHABLE
