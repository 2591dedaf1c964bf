"""Give pages that nothing uses any more back to the file system."""

from __future__ import annotations

import os
import shutil
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from token_id_capture.errors import StorageFullError
from token_id_capture.store.file.read_only import wal_bytes
from token_id_capture.store.maintain.maintenance import Maintenance, maintenance
from token_id_capture.store.maintain.verification import Progress

# 4 MB: the writers wait for some tens of milliseconds.
PAGES_PER_STEP: Final = 512
_CHECKPOINT_WAL_BYTES: Final = 64 * 2**20
_INSTRUCTIONS_PER_TICK: Final = 100_000


@dataclass(frozen=True, slots=True)
class Vacuumed:
    """Sizes of the database file in bytes.

    ``waiting`` is what will still go when a reader that holds the WAL has left and the next
    checkpoint is made. ``incremental`` is false for a file that cannot be vacuumed in steps.
    """

    size_before: int
    size_after: int
    waiting: int
    incremental: bool


def vacuum(path: Path, progress: Progress = lambda what, done, total: None) -> Vacuumed:
    """Cut the free pages off the end of the file, in short steps between which others write.

    Pages that become free meanwhile are left for the next time.

    Raises:
        UnusableDatabaseError: the file is missing or cannot be used.
        StorageFullError: there is no room for the WAL.
    """
    with maintenance(path) as work:
        before = os.stat(path).st_size
        incremental = _pragma(work.connection, "auto_vacuum") == 2
        total = _pragma(work.connection, "freelist_count") if incremental else 0
        for done in range(0, total, PAGES_PER_STEP):
            progress("vacuum", done, total)
            with work.turn() as connection:
                # A script, because execute() stops after the first of the pages that it frees.
                connection.executescript(f"PRAGMA incremental_vacuum({min(PAGES_PER_STEP, total - done)})")
            if wal_bytes(path) > _CHECKPOINT_WAL_BYTES:
                with work.turn() as connection:
                    connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        progress("vacuum", total, total)
        return _measured(work, before, incremental)


def rebuild(path: Path, progress: Progress = lambda what, done, total: None) -> Vacuumed:
    """Write the whole file anew without free pages; all writers wait until that is done.

    Raises:
        UnusableDatabaseError: the file is missing or cannot be used.
        StorageFullError: the disk has less room than the content takes twice.
    """
    with maintenance(path) as work:
        before = os.stat(path).st_size
        _check_room(work)
        work.connection.set_progress_handler(lambda: progress("rebuild", 0, None), _INSTRUCTIONS_PER_TICK)
        with work.turn() as connection:
            # It takes effect with the VACUUM, in a file that was made without it.
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("VACUUM")
        work.connection.set_progress_handler(None, 0)
        return _measured(work, before, incremental=True)


def _measured(work: Maintenance, before: int, incremental: bool) -> Vacuumed:
    work.checkpoint()
    after = os.stat(work.path).st_size
    content = _pragma(work.connection, "page_count") * _pragma(work.connection, "page_size")
    return Vacuumed(before, after, max(0, after - content), incremental)


def _check_room(work: Maintenance) -> None:
    pages = _pragma(work.connection, "page_count") - _pragma(work.connection, "freelist_count")
    needed = 2 * pages * _pragma(work.connection, "page_size")
    free = shutil.disk_usage(work.path.parent).free
    if free < needed:
        raise StorageFullError(
            f"a rebuild of {work.path} writes its content twice, {needed:,} bytes, and {free:,} are free: "
            "free some space, or run tokcap vacuum without --full"
        )


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])
