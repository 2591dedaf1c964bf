"""Standard output that does not hold its writer up.

While a query has rows left, its transaction is open, and an open transaction keeps the write-ahead
log of the database from shrinking. So a person who pages through a result must not stop the query:
what they have not seen yet waits in a temporary file.
"""

from __future__ import annotations

import os
import tempfile
import threading
from types import TracebackType
from typing import Final, Self

IN_MEMORY: Final = 4 * 2**20
ON_DISK: Final = 256 * 2**20

_CHUNK: Final = 64 * 2**10


class Spool:
    """Writes to a descriptor from a thread of its own; use it as ``with Spool(1) as spool``.

    Args:
        descriptor: what the bytes go to.
        capacity: how many bytes may wait for the reader; ``write`` blocks beyond it.
    """

    def __init__(self, descriptor: int, capacity: int = ON_DISK) -> None:
        self._descriptor = descriptor
        self._capacity = capacity
        self._waiting = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115  closed by __exit__
        self._read = self._written = 0
        self._ended = False
        self._error: OSError | None = None
        self._changed = threading.Condition()
        # A daemon: after Ctrl-C nobody waits until a reader has taken what is left.
        self._thread = threading.Thread(target=self._pump, name="tokcap-output", daemon=True)

    @property
    def failed(self) -> bool:
        """Whether writing has failed, as on a pipe whose reader has left."""
        return self._error is not None

    def write(self, data: bytes) -> None:
        """Hand ``data`` over.

        Raises:
            OSError: an earlier write failed; ``BrokenPipeError`` if the reader has left.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._written - self._read < self._capacity)
            if self._error is not None:
                raise self._error
            self._waiting.seek(self._written)
            self._waiting.write(data)
            self._written += len(data)
            self._changed.notify_all()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait until the reader has taken everything, unless Ctrl-C ended the block.

        Raises:
            OSError: writing failed; that is also why a block was interrupted that asked ``failed``.
        """
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if kind is not None and not issubclass(kind, Exception):
            return
        self._thread.join()
        self._waiting.close()
        if self._error is not None and (kind is None or issubclass(kind, InterruptedError)):
            raise self._error from error

    def _pump(self) -> None:
        while chunk := self._next():
            try:
                view = memoryview(chunk)
                while view:
                    view = view[os.write(self._descriptor, view) :]
            except OSError as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return

    def _next(self) -> bytes:
        """The next bytes to write; empty when all are written and no more will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._read < self._written)
            self._waiting.seek(self._read)
            chunk = self._waiting.read(_CHUNK)
            self._read += len(chunk)
            if self._read == self._written:
                # The reader has caught up: the file begins anew instead of growing.
                self._read = self._written = 0
                self._waiting.seek(0)
                self._waiting.truncate()
            self._changed.notify_all()
            return chunk
