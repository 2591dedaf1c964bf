"""The weight version that a trainer has stamped, beside the database, where every process of a server sees it.

A file of its own, because each call asks for it: a ``stat`` costs two microseconds and waits for no lock.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path


class WeightVersionFile:
    """``<database>.weight-version``; it holds the version as text, and is absent if none is stamped."""

    def __init__(self, database: Path) -> None:
        self._path = database.with_name(f"{database.name}.weight-version")
        self._name = str(self._path)  # a path's own stat takes three times as long
        self._seen: tuple[int, int] | None = None
        self._version: str | None = None

    def read(self) -> str | None:
        """The version that is stamped now; None if there is none."""
        try:
            status = os.stat(self._name)
            # Each version is a file of its own, which replaces the one before.
            if (status.st_ino, status.st_mtime_ns) != self._seen:
                self._version = self._path.read_text("utf-8")
                self._seen = status.st_ino, status.st_mtime_ns
        except (OSError, UnicodeDecodeError):
            self._seen, self._version = None, None
        return self._version

    def write(self, version: str | None) -> None:
        """Stamp what is captured from now on, or stop it. Blocks.

        Raises:
            OSError: the file cannot be written.
        """
        if version is None:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
            return
        temporary = self._path.with_name(f"{self._path.name}.{uuid.uuid4().hex[:8]}")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(descriptor, "w", encoding="utf-8") as stream:
                stream.write(version)
                stream.flush()
                os.fsync(descriptor)
            temporary.replace(self._path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
