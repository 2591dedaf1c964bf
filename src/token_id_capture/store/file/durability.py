"""What is on the disk once an fsync has failed, and how to trust it again.

After a failed fsync Linux calls the pages clean that it could not write (https://lwn.net/Articles/752063/). A
later fsync of them succeeds and writes nothing, and everything still reads well, until the power fails. SQLite
would continue behind such a hole in its log, whose rest is worth nothing then. So the first process that notices an
I/O error leaves a note beside the database (``WriterLock.doubt``), and nobody acknowledges anything before the
whole log was written anew and moved into the file.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from token_id_capture.errors import StoreError, UnusableDatabaseError
from token_id_capture.store.file.connections import BUSY_TIMEOUT_MILLISECONDS
from token_id_capture.store.file.lock import WriterLock
from token_id_capture.store.file.read_only import wal_bytes

_LOG_HEADER: Final = 32
_FRAME_HEADER: Final = 24
"""Bytes of the log beside its pages: https://www.sqlite.org/fileformat2.html#walformat"""
_BLOCK: Final = 2**20
_READERS_MILLISECONDS: Final = 1000


class UnsettledError(StoreError):
    """After an I/O error it is not certain yet that what is acknowledged now would be on the disk."""


def settle(connection: sqlite3.Connection, path: Path, writer_lock: WriterLock) -> None:
    """Make certain that all that was committed is on the disk. Call it behind the writer lock, while in doubt.

    Raises:
        UnsettledError: a reader holds the log, or the disk still fails; try again before the next commit.
        UnusableDatabaseError: the file is damaged.
        sqlite3.Error: another I/O error.
    """
    try:
        _write_anew(f"{path}-wal")
    except OSError as error:
        raise UnsettledError(f"the log of {path} cannot be written after an I/O error: {error.strerror}") from error
    connection.execute(f"PRAGMA busy_timeout = {_READERS_MILLISECONDS}")
    try:
        busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
    finally:
        connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MILLISECONDS}")
    if busy:
        raise UnsettledError(
            f"{path} had an I/O error, and a reader keeps its log from being moved into the file: nothing is "
            "acknowledged before that. End the process that keeps a transaction open on it."
        )
    damage = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if damage != "ok":
        raise UnusableDatabaseError(f"{path} is damaged after an I/O error: {damage}. Run tokcap verify on it.")
    writer_lock.settled()


def cut_short(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether another program has cut the database or its log, of which content is missing then.

    Call it behind the writer lock, where ``WriterLock.shrunk``. A checkpoint by a process that was killed right after
    it, or by another program, makes them smaller too, and leaves nothing out.
    """
    page_size, pages = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_size", "page_count"))
    try:
        # The count includes pages that only the log holds, so the file is measured once they are in it.
        _, frames, moved = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        size = os.stat(path).st_size
        # What is in this connection's cache is not read from the file.
        connection.execute("PRAGMA shrink_memory")
        sound = connection.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok"
    except sqlite3.Error:
        return True
    # One that was removed is not cut: what is open of it is whole, and OpenFiles notices that.
    size_of_log = wal_bytes(path) if os.path.exists(f"{path}-wal") else None
    whole_log = size_of_log is None or frames <= 0 or size_of_log >= _LOG_HEADER + frames * (_FRAME_HEADER + page_size)
    return not (sound and whole_log and (size >= pages * page_size or moved < frames))


def _write_anew(name: str) -> None:
    """Write a file over itself, which makes the kernel write all of it at the next sync, and sync it.

    The log may be opened so, unlike the database: SQLite has no locks on it that the close would drop.
    """
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        offset = 0
        while block := os.pread(descriptor, _BLOCK, offset):
            offset += os.pwrite(descriptor, block, offset)
        full_sync(descriptor)
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Wait until a file's content, or a directory's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        full_sync(descriptor)
    finally:
        os.close(descriptor)


def _fsync_function() -> Callable[[int], object]:
    if sys.platform == "darwin":
        import fcntl

        # fsync there leaves the data in the drive's own cache.
        return lambda descriptor: fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    return os.fsync


full_sync: Final = _fsync_function()
