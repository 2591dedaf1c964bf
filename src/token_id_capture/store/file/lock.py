"""One writer at a time, over all processes: an ``flock`` on a file beside the database.

SQLite's own write lock is polled, and newcomers overtake those who wait. Queueing on ``flock``
gave a third of the longest wait. The writer lock is also what keeps SQLite versions before 3.51.3 safe
from the WAL-reset bug, as every commit and every checkpoint happens behind it.

The lock is on a file of its own, never on the database: closing any descriptor of the database
would drop SQLite's own locks on it. A holder that dies frees it, since the kernel closes its files.

What one holder must tell the next stands in the lock file: whether an I/O error was seen, and how large it left the
database and its log. It need not outlast the power: after a loss of power what is read is what is on the disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from pathlib import Path
from types import TracebackType
from typing import Final

from token_id_capture.errors import UnusableDatabaseError
from token_id_capture.store.file.connections import is_input_output_error

_NOTE: Final = struct.Struct("<?qq")
_UNEXPLAINED: Final = 2**62


class WriterLock:
    """The lock file of one database. Not shared between threads, nor across ``fork``."""

    def __init__(self, database: Path) -> None:
        self._files = f"{database}", f"{database}-wal"
        self._path = database.with_name(database.name + ".lock")
        self._descriptor: int | None = None
        self.in_doubt = False
        """Whether an I/O error was seen, by whichever process, and is not settled; as of when the lock was taken."""
        self.shrunk = False
        """Whether the database or its log is smaller than its latest holder left it, and nobody knows why."""

    def __enter__(self) -> None:
        while True:
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            if os.fstat(self._descriptor).st_nlink:
                self._read_note(self._descriptor)
                return
            # Somebody removed the file, so others queue on a new one.
            self.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and is_input_output_error(error):
            self.doubt()
        if self._descriptor is not None:
            self._leave_note(self._descriptor)
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def doubt(self) -> None:
        """Have everybody who takes the lock know of an I/O error. Call it while the lock is held."""
        self.in_doubt = True
        if self._descriptor is not None:
            # At once, so that a kill from here on cannot lose it.
            self._leave_note(self._descriptor)

    def settled(self) -> None:
        """Take back ``doubt``."""
        self.in_doubt = False

    def accept_sizes(self) -> None:
        """The files are as small as they are for a good reason."""
        self.shrunk = False

    def _read_note(self, descriptor: int) -> None:
        note = os.pread(descriptor, _NOTE.size, 0)
        self.in_doubt, *left = _NOTE.unpack(note) if len(note) == _NOTE.size else (False, 0, 0)
        self.shrunk = any(size < before for size, before in zip(self._sizes(), left, strict=True))

    def _leave_note(self, descriptor: int) -> None:
        # Sizes that this holder could not explain are for the next one to explain, however large the files are then.
        sizes = (_UNEXPLAINED, _UNEXPLAINED) if self.shrunk else self._sizes()
        # A disk that takes no note is in doubt for this process alone.
        with contextlib.suppress(OSError):
            os.pwrite(descriptor, _NOTE.pack(self.in_doubt, *sizes), 0)

    def _sizes(self) -> tuple[int, int]:
        database, log = self._files
        return _size(database), _size(log)

    def close(self) -> None:
        """Give the descriptor back; the next use opens the file again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def was_emptied(database: Path) -> bool:
    """Whether a file is empty that its latest writer left with content. Call it behind the writer lock, or only to
    choose words: whoever makes the file anew may just have begun."""
    try:
        note = database.with_name(f"{database.name}.lock").read_bytes()
    except OSError:
        return False
    return database.exists() and not _size(f"{database}") and len(note) == _NOTE.size and _NOTE.unpack(note)[1] > 0


def empty(path: Path) -> UnusableDatabaseError:
    """The error for an empty file where a database should be."""
    if was_emptied(path):
        return UnusableDatabaseError(
            f"{path} is an empty file, and captures were stored in it: another program emptied it. Restore a backup, "
            "or remove it to begin a new database"
        )
    return UnusableDatabaseError(f"{path} is an empty file: no capture was ever stored in it")


def _size(name: str) -> int:
    try:
        return os.stat(name).st_size
    except OSError:
        return 0
