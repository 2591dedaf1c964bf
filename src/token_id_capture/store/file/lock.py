"""One writer at a time, over all processes: an ``flock`` on a file beside the database.

SQLite's own write lock is polled, and newcomers overtake those who wait. Queueing on ``flock``
gave a third of the longest wait. The writer lock is also what keeps SQLite versions before 3.51.3 safe
from the WAL-reset bug, as every commit and every checkpoint happens behind it.

The lock is on a file of its own, never on the database: closing any descriptor of the database
would drop SQLite's own locks on it. A holder that dies frees it, since the kernel closes its files.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType


class WriterLock:
    """The lock file of one database. Not shared between threads, nor across ``fork``."""

    def __init__(self, database: Path) -> None:
        self._path = database.with_name(database.name + ".lock")
        self._descriptor: int | None = None

    def __enter__(self) -> None:
        while True:
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            if os.fstat(self._descriptor).st_nlink:
                return
            # Somebody removed the file, so others queue on a new one.
            self.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Give the descriptor back; the next use opens the file again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
