"""Whether the files that a connection has open are still those that others find under their names.

A file that was removed or replaced can be written for as long as it is open, and nobody will ever
read that. SQLite notices neither for the database nor for its log, so the writer looks before it
acknowledges.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Final, NoReturn

from token_id_capture.errors import ReplacedDatabaseError, UnusableDatabaseError

_SUFFIXES: Final = ("-wal", "-shm")

Identity = tuple[int, int] | None


class DatabaseFile:
    """The one file that a store works with, from its first open on.

    Whatever takes its place lacks calls of rollouts that are open, and they would look whole in it. So another
    file is neither written nor read, and none is created, until somebody makes a new store.
    """

    def __init__(self, path: Path, file_id: str | None = None) -> None:
        """``file_id`` is that of the file which another process had open before, if it is to be the same."""
        self.path = path
        self.file_id = file_id
        self._inode: Identity = None
        self._lost = False

    @property
    def known(self) -> bool:
        """Whether it was open before, and so must not be created."""
        return self._inode is not None or self.file_id is not None

    def recognise(self, connection: sqlite3.Connection) -> None:
        """Remember which file a connection has just opened; from the second time on, compare.

        Raises:
            ReplacedDatabaseError: it is another one.
        """
        file_id = file_id_of(connection, self.path)
        self.file_id = self.file_id or file_id
        self.see()
        if file_id != self.file_id:
            self.refuse()

    def see(self) -> None:
        """Remember the file of this name, if none is known yet, without a look inside.

        Raises:
            ReplacedDatabaseError: it is another one than before.
        """
        self._inode = self._inode or identity(f"{self.path}")
        self.check()

    def check(self) -> None:
        """Look whether the file is still there.

        Raises:
            ReplacedDatabaseError: it is not, or was not at an earlier look.
        """
        found = identity(f"{self.path}") if self.known else None
        if self._lost or (self.known and (found is None or self._inode not in (None, found))):
            self.refuse()

    def refuse_lost(self) -> None:
        """As ``check``, without looking anew."""
        if self._lost:
            self.refuse()

    def refuse(self) -> NoReturn:
        """Stop using it."""
        self._lost = True
        raise ReplacedDatabaseError(
            f"{self.path} was removed or replaced, or cut short, while it was in use, so nothing is acknowledged or "
            "read any more: what is there now lacks calls that were stored before. Start again to use it, and run the "
            "rollouts that were open under new ids."
        )


class OpenFiles:
    """The database, its log and its index, as they were when a connection began to use them."""

    def __init__(self, database: DatabaseFile) -> None:
        """Call it right after the connection was opened."""
        self._database = database
        self._known: dict[str, Identity] = {}

    def check(self) -> None:
        """Call it within a transaction that has written: all three are there for as long as it lasts.

        Raises:
            ReplacedDatabaseError: the database is not the file that it was.
            UnusableDatabaseError: the log or the index is not.
        """
        self._database.check()
        for suffix in _SUFFIXES:
            found = identity(f"{self._database.path}{suffix}")
            if found is None or self._known.setdefault(suffix, found) != found:
                raise UnusableDatabaseError(
                    f"{self._database.path}{suffix} was removed or replaced while it was in use, so this write is not "
                    "acknowledged: leave the database and its -wal and -shm files alone while a process has it open"
                )


def file_id_of(connection: sqlite3.Connection, path: Path) -> str:
    """What tells this database from every other, and from its own backups.

    Raises:
        UnusableDatabaseError: there is no such row.
    """
    row = connection.execute("SELECT file_id FROM capture_file").fetchone()
    if row is None:
        raise UnusableDatabaseError(f"{path} has lost its identity, the row in capture_file: restore a backup")
    return str(row[0])


def identity(path: str) -> Identity:
    """What tells the file of this name from another that takes its place; None if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
