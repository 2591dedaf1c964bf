"""A consistent copy of a database that others are writing.

``VACUUM INTO`` reads one snapshot while writers continue, leaves free pages out, and carries nothing
over of what was deleted. (The backup API would copy the free pages too, and starts again whenever
another process commits, unless all pages go in one uninterruptible step.) The copy is made under a
temporary name beside the destination and gets its name only when it is whole and on disk.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from token_id_capture import reasons
from token_id_capture.errors import StorageFullError, StoreError, UnusableDatabaseError
from token_id_capture.lifecycle import State
from token_id_capture.store.file.durability import sync
from token_id_capture.store.file.read_only import read_only
from token_id_capture.store.maintain.leftovers import abandoned, held
from token_id_capture.store.maintain.verification import Checked, Damage, Progress, verify

# SQLite's instructions between two looks at the size of the copy; a row takes about three.
_INSTRUCTIONS_PER_TICK: Final = 200

PARTIAL: Final = ".*.????????.partial"
"""The names of copies that are being made, or whose making was killed."""

_IS_OPEN: Final = f"state = '{State.OPEN}'"
_FLAG_OPEN: Final = f"""
    INSERT INTO incomplete_flags (rollout_id, model_call_id, reason, detail, flagged_at)
    SELECT rollout_id, '', :reason, 'calls after the copy are not in it', :now FROM rollouts WHERE {_IS_OPEN}
"""


def back_up(
    source: Path,
    destination: Path,
    checked: Checked,
    progress: Progress = lambda what, done, total: None,
    *,
    flag_open: bool = True,
) -> list[Damage]:
    """Copy ``source`` to the new file ``destination`` (mode 0600), and verify the copy.

    Args:
        flag_open: flag the rollouts that are open in the copy as incomplete. Calls that come after the
            copy are missing from it, and without a flag a restored copy would deliver them as whole.

    Returns:
        What is damaged in the copy, as it then is in the source: the copy is kept, since it may be
        all that can be saved. Empty if it is sound.

    Raises:
        StoreError: there is something at ``destination``; it is left as it is.
        UnusableDatabaseError: the source cannot be read, or the destination not written.
        StorageFullError: there is no room for the copy.
    """
    _refuse_existing(destination)
    with _temporary_file(destination) as temporary:
        _copy(source, temporary, destination, progress, flag_open=flag_open)
        sync(temporary)
        damages = list(verify(temporary, checked, progress, nobody_writes=True))
        _publish(temporary, destination)
    sync(destination.parent)
    return damages


def _copy(source: Path, temporary: Path, destination: Path, progress: Progress, *, flag_open: bool) -> None:
    try:
        with read_only(source, may_vacuum_into=True) as connection, _ticking(connection, temporary, progress):
            connection.execute("VACUUM INTO ?", (str(temporary),))
        _finish(temporary, flag_open=flag_open)
    except StorageFullError as error:
        raise StorageFullError(f"no room for the backup {destination}: free some space, then try again") from error


@contextmanager
def _ticking(connection: sqlite3.Connection, temporary: Path, progress: Progress) -> Iterator[None]:
    """Show how much of the copy is there; an interrupt by the user ends the copy."""
    pages, free, page_size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    interrupts: list[BaseException] = []

    def tick() -> int:
        try:
            progress("copy", os.stat(temporary).st_size, (pages - free) * page_size)
        except BaseException as error:
            # sqlite3 would drop it and only say that it was interrupted.
            interrupts.append(error)
            return 1
        return 0

    connection.set_progress_handler(tick, _INSTRUCTIONS_PER_TICK)
    try:
        yield
    except sqlite3.OperationalError:
        if interrupts:
            raise interrupts[0] from None
        raise
    finally:
        connection.set_progress_handler(None, 0)


def _finish(temporary: Path, *, flag_open: bool) -> None:
    """Make the copy a capture database of its own."""
    connection = sqlite3.connect(temporary, isolation_level=None)
    try:
        # In exclusive mode SQLite needs no shared memory for the log, so the copy may lie on any file system.
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        # VACUUM INTO leaves the journal mode out, and the store refuses any but WAL.
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("BEGIN IMMEDIATE")
        copied = {"copy": uuid.uuid4().hex, "now": time.time(), "reason": reasons.OPEN_IN_BACKUP}
        connection.execute("UPDATE capture_file SET copied_from = file_id, file_id = :copy, made_at = :now", copied)
        if flag_open:
            connection.execute(_FLAG_OPEN, copied)
            connection.execute(f"UPDATE rollouts SET version = version + 1 WHERE {_IS_OPEN}")
        connection.execute("COMMIT")
    finally:
        connection.close()


@contextmanager
def _temporary_file(destination: Path) -> Iterator[Path]:
    for path in abandoned(destination.parent, PARTIAL.replace("*", destination.name, 1)):
        _remove(path)
    temporary = destination.with_name(f".{destination.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        os.close(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise UnusableDatabaseError(f"cannot write {destination}: {error.strerror}") from error
    try:
        with held(temporary):
            yield temporary
    finally:
        _remove(temporary)


def _remove(temporary: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{temporary}{suffix}")


def _publish(temporary: Path, destination: Path) -> None:
    try:
        # Unlike a rename, a link never replaces what somebody put there meanwhile.
        os.link(temporary, destination)
    except FileExistsError:
        _refuse_existing(destination)
        raise
    except OSError:
        # A file system without hard links.
        _refuse_existing(destination)
        os.rename(temporary, destination)


def _refuse_existing(destination: Path) -> None:
    if os.path.lexists(destination):
        what = "a directory" if destination.is_dir() else "there already"
        raise StoreError(f"{destination} is {what}, and a backup never overwrites: name a new file")
