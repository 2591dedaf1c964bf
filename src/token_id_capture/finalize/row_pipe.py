"""Rows on standard output. Nobody knows what becomes of them there, so nothing is retired or called delivered."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from typing import Self

from token_id_capture.finalize.rows import Delivered


class RowPipe:
    """Rows that go to a descriptor, by default standard output, from a thread that a slow reader may hold."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = sys.stdout.fileno() if descriptor is None else descriptor
        self._waiting: list[bytes] = []
        self.delivered: dict[str, Delivered] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def append(self, row: bytes) -> None:
        """Add one row, which ends in a newline."""
        self._waiting.append(row)

    async def drain(self) -> None:
        """Wait until the reader, or the pipe, has taken every row.

        Raises:
            OSError: they cannot be written; ``BrokenPipeError`` if the reader has left.
        """
        rows, self._waiting = b"".join(self._waiting), []
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def settle(error: OSError | None) -> None:
            if not done.done():
                done.set_exception(error) if error is not None else done.set_result(None)

        def write() -> None:
            error: OSError | None = None
            try:
                _write_all(self._descriptor, rows)
            except OSError as problem:
                error = problem
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits any more
                loop.call_soon_threadsafe(settle, error)

        # A daemon, for nothing can wake a thread whose reader takes nothing.
        threading.Thread(target=write, name="token-id-capture-rows", daemon=True).start()
        await done


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
