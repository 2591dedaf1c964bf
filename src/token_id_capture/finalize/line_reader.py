"""Lines of a file or pipe in batches, read in a thread so that a slow pipe never stops the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import BinaryIO

from token_id_capture.errors import TokenCaptureError


class UnreadableInputError(TokenCaptureError):
    """The input broke off with an error of the system."""


class LineReader:
    """Numbered lines, from 1, as many at a time as are there, at most ``limit``.

    Make it inside a running event loop.
    """

    def __init__(self, stream: BinaryIO, limit: int) -> None:
        self._stream = stream
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._lines: asyncio.Queue[tuple[int, bytes] | OSError | None] = asyncio.Queue()
        self._room = threading.Semaphore(limit)
        self._ended = False
        # A daemon, for nothing can wake a thread that waits for a pipe.
        threading.Thread(target=self._read, name="token-id-capture-lines", daemon=True).start()

    async def batch(self) -> list[tuple[int, bytes]]:
        """The next lines; an empty list at the end or after ``stop``.

        Raises:
            UnreadableInputError: reading failed.
        """
        lines: list[tuple[int, bytes]] = []
        while not self._ended and len(lines) < self._limit and not (lines and self._lines.empty()):
            item = await self._lines.get()
            if isinstance(item, OSError):
                raise UnreadableInputError(f"cannot read the input: {item.strerror}") from item
            if item is None:
                self._ended = True
            else:
                lines.append(item)
                self._room.release()
        return lines

    def stop(self) -> None:
        """End after the batch that is being worked on."""
        self._ended = True
        self._lines.put_nowait(None)

    def _read(self) -> None:
        try:
            # Closed here, because a close from elsewhere would wait for the current read.
            with self._stream as lines:
                for numbered in enumerate(lines, 1):
                    self._room.acquire()
                    self._hand_over(numbered)
            self._hand_over(None)
        except OSError as error:
            self._hand_over(error)

    def _hand_over(self, item: tuple[int, bytes] | OSError | None) -> None:
        # The loop may have ended meanwhile; then nobody wants the line any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._lines.put_nowait, item)
