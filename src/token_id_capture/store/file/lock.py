"""One writer at a time, over all processes: an ``flock`` on a file beside the database.

SQLite's own write lock is polled, and newcomers overtake those who wait. Queueing on ``flock``
gave a third of the longest wait. The writer lock is also what keeps SQLite versions before 3.51.3 safe
from the WAL-reset bug, as every commit and every checkpoint happens behind it.

The lock is on a file of its own, never on the database: closing any descriptor of the database
would drop SQLite's own locks on it. A holder that dies frees it, since the kernel closes its files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from types import TracebackType

from token_id_capture.store.file.connections import is_input_output_error


class WriterLock:
    """The lock file of one database. Not shared between threads, nor across ``fork``."""

    def __init__(self, database: Path) -> None:
        self._path = database.with_name(database.name + ".lock")
        self._descriptor: int | None = None
        self.in_doubt = False
        """Whether an I/O error was seen, by whichever process, since when nobody could settle it; true or false of
        the time at which the lock was taken."""

    def __enter__(self) -> None:
        while True:
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            status = os.fstat(self._descriptor)
            if status.st_nlink:
                self.in_doubt = status.st_size > 0
                return
            # Somebody removed the file, so others queue on a new one.
            self.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and is_input_output_error(error):
            self.doubt()
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def doubt(self) -> None:
        """Have everybody who takes the lock know of an I/O error. Call it while the lock is held.

        The note lies in the lock file's size. It need not outlast the power: after a loss of power what is read is
        what is on the disk.
        """
        self.in_doubt = True
        self._note(1)

    def settled(self) -> None:
        """Take back ``doubt``."""
        self._note(0)
        self.in_doubt = False

    def _note(self, size: int) -> None:
        # A disk that does not even take this is in doubt for this process alone.
        with contextlib.suppress(OSError):
            if self._descriptor is not None:
                os.ftruncate(self._descriptor, size)

    def close(self) -> None:
        """Give the descriptor back; the next use opens the file again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
