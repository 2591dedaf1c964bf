"""Whether the files that a connection has open are still those that others find under their names.

A file that was removed or replaced can be written for as long as it is open, and nobody will ever
read that. SQLite notices neither for the database nor for its log, so the writer looks before it
acknowledges.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from token_id_capture.errors import UnusableDatabaseError

_SUFFIXES: Final = ("", "-wal", "-shm")

Identity = tuple[int, int] | None


class OpenFiles:
    """The database, its log and its index, as they were when a connection began to use them."""

    def __init__(self, path: Path) -> None:
        """Call it right after the connection was opened."""
        self._path = path
        self._known: dict[str, Identity] = {"": identity(f"{path}")}

    def check(self) -> None:
        """Call it within a transaction that has written: all three are there for as long as it lasts.

        Raises:
            UnusableDatabaseError: one of them is not the file that it was.
        """
        for suffix in _SUFFIXES:
            found = identity(f"{self._path}{suffix}")
            if found is None or self._known.setdefault(suffix, found) != found:
                raise UnusableDatabaseError(
                    f"{self._path}{suffix} was removed or replaced while it was in use, so this write is not "
                    "acknowledged: leave the database and its -wal and -shm files alone while a process has it open"
                )


def identity(path: str) -> Identity:
    """What tells the file of this name from another that takes its place; None if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
