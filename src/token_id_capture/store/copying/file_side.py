"""A capture file as the source or the target of a copy."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Final

from token_id_capture.store.copying.parts import WRITERS, LeftOutError, Part, Row
from token_id_capture.store.copying.statements import COUNT, LISTED, OF_WRITERS, PAGE, of_rollouts
from token_id_capture.store.file.read_only import needs_a_writer, read_only, transaction, wal_bytes
from token_id_capture.store.maintain.maintenance import Maintenance, maintenance
from token_id_capture.store.maintain.verification import Damage
from token_id_capture.store.write.writer import CHECKPOINT_BYTES

# A snapshot's copies tell by it whose they are.
_OWNER: Final = (
    "(SELECT s.rollout_id FROM snapshots AS s WHERE s.snapshot_id = t.snapshot_id AND s.version = t.version)"
)


def _own_columns(part: Part) -> tuple[str, ...]:
    """The columns of a part that its table has, which may be all but the first."""
    return tuple(name for name in part.columns if name in part.table.columns)


@lru_cache
def _selection(part: Part, columns: Sequence[str]) -> str:
    name = part.table.name
    found = OF_WRITERS if part is WRITERS else of_rollouts(name)
    if part.table.dialect_options["sqlite"]["with_rowid"]:
        # In the order of their storing; to be sorted, rows as wide as calls are copied once more.
        found = f"rowid IN (SELECT rowid FROM {name} WHERE {found}) ORDER BY rowid"
    read = (column if column in part.table.columns else _OWNER for column in columns)
    return f"SELECT {', '.join(read)} FROM {name} AS t WHERE {found}"


class _FileRows:
    """Rows as one transaction sees them."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def select(self, part: Part, columns: Sequence[str], rollout_ids: Sequence[str]) -> Iterator[Row]:
        """See ``Rows``."""
        yield from self._connection.execute(_selection(part, columns), {"rollout_ids": json.dumps(rollout_ids)})

    def insert(self, part: Part, rows: Iterable[Row]) -> None:
        """See ``WritableRows``."""
        columns = _own_columns(part)
        dropped = len(part.columns) - len(columns)
        ignoring = " ON CONFLICT DO NOTHING" if part is WRITERS else ""
        self._connection.executemany(
            f"INSERT INTO {part.table.name} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))}){ignoring}",
            (row[dropped:] for row in rows),
        )


class _SourceRows(_FileRows):
    def select(self, part: Part, columns: Sequence[str], rollout_ids: Sequence[str]) -> Iterator[Row]:
        try:
            yield from super().select(part, columns, rollout_ids)
        except sqlite3.DatabaseError as error:
            raise LeftOutError(Damage(f"cannot be read ({error})", rollout_ids[0])) from error


class _File:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def identity(self) -> object:
        """See ``Side``."""
        found = self._path.stat()
        return found.st_dev, found.st_ino


class FileSource(_File):
    """Reads a file, in short transactions while others write it; see ``Source``."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        super().__init__(path)
        self._connection = connection

    def count(self) -> int:
        """See ``Source``."""
        return int(self._connection.execute(COUNT).fetchone()[0])

    def page(self, after: str, limit: int) -> list[tuple[str, int]]:
        """See ``Source``."""
        return self._connection.execute(PAGE, {"after": after, "limit": limit}).fetchall()

    def listed(self, rollout_ids: Sequence[str]) -> list[tuple[str, int]]:
        """See ``Source``."""
        return self._connection.execute(LISTED, {"rollout_ids": json.dumps(rollout_ids)}).fetchall()

    @contextmanager
    def state(self) -> Iterator[_SourceRows]:
        """See ``Source``."""
        with transaction(self._connection):
            yield _SourceRows(self._connection)


class FileTarget(_File):
    """Writes a file, taking turns with others that write it; see ``Target``."""

    def __init__(self, work: Maintenance) -> None:
        super().__init__(work.path)
        self._work = work
        self._checkpoint_at = CHECKPOINT_BYTES

    @contextmanager
    def transaction(self) -> Iterator[_FileRows]:
        """See ``Target``."""
        with self._work.transaction():
            yield _FileRows(self._work.connection)
        size = wal_bytes(self._path)
        if size > self._checkpoint_at:
            # Where a reader keeps the log from shrinking, the next try waits until it has grown as much again.
            self._checkpoint_at = CHECKPOINT_BYTES + (0 if self._work.checkpoint() else size)


@contextmanager
def file_source(path: Path) -> Iterator[FileSource]:
    """Open a file for reading; one of an older release is brought up to date first.

    Raises:
        UnusableDatabaseError: it is missing or cannot be used.
    """
    if needs_a_writer(path):
        with maintenance(path):
            pass
    with read_only(path) as connection:
        yield FileSource(path, connection)


@contextmanager
def file_target(path: Path) -> Iterator[FileTarget]:
    """Open a file for writing; it is made if it is missing.

    Raises:
        UnusableDatabaseError: it cannot be used.
    """
    with maintenance(path, create=True) as work:
        yield FileTarget(work)
