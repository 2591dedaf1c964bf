"""A capture file as the source or the target of a copy."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from token_id_capture.store.copying.parts import NAMING_WRITERS, WRITERS, DamagedRowsError, Part, Row
from token_id_capture.store.file.read_only import needs_a_writer, read_only, transaction, wal_bytes
from token_id_capture.store.maintain.maintenance import Maintenance, maintenance
from token_id_capture.store.maintain.verification import Damage
from token_id_capture.store.write.writer import CHECKPOINT_BYTES

_AMONG: Final = "IN (SELECT value FROM json_each(:rollout_ids))"
_OF_SNAPSHOTS: Final = f"IN (SELECT snapshot_id FROM snapshots WHERE rollout_id {_AMONG})"
_CALLS: Final = "(SELECT count(*) FROM entries AS e WHERE e.rollout_id = p.rollout_id)"
_WITH_IDS: Final = ("rollouts", "build_outcomes", "late_writes")
_PAGE: Final = f"""
    SELECT p.rollout_id, {_CALLS} FROM (
        {
    " UNION ".join(
        f"SELECT rollout_id FROM (SELECT DISTINCT rollout_id FROM {table} WHERE rollout_id > :after "
        "ORDER BY rollout_id LIMIT :limit)"
        for table in _WITH_IDS
    )
}
        ORDER BY rollout_id LIMIT :limit
    ) AS p ORDER BY p.rollout_id
"""
_LISTED: Final = f"SELECT p.rollout_id, {_CALLS} FROM (SELECT value AS rollout_id FROM json_each(:rollout_ids)) AS p"


def _of_rollouts(part: Part) -> str:
    """The condition that finds the rows of a part."""
    if part is WRITERS:
        named = " UNION ".join(
            f"SELECT writer_id FROM {one.table.name} WHERE {_of_rollouts(one)}" for one in NAMING_WRITERS
        )
        return f"writer_id IN ({named})"
    return f"{part.key} {_AMONG if part.key == 'rollout_id' else _OF_SNAPSHOTS}"


def _selection(part: Part, columns: Sequence[str]) -> str:
    name, found = part.table.name, _of_rollouts(part)
    if part.table.dialect_options["sqlite"]["with_rowid"]:
        # In the order of their storing; to be sorted, rows as wide as calls are copied once more.
        found = f"rowid IN (SELECT rowid FROM {name} WHERE {found}) ORDER BY rowid"
    return f"SELECT {', '.join(columns)} FROM {name} WHERE {found}"


class _FileRows:
    """Rows as one transaction sees them."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def select(self, part: Part, columns: Sequence[str], rollout_ids: Sequence[str]) -> Iterator[Row]:
        """See ``Rows``."""
        yield from self._connection.execute(_selection(part, columns), {"rollout_ids": json.dumps(rollout_ids)})

    def insert(self, part: Part, rows: Iterable[Row]) -> None:
        """See ``WritableRows``."""
        ignoring = " ON CONFLICT DO NOTHING" if part is WRITERS else ""
        self._connection.executemany(
            f"INSERT INTO {part.table.name} ({', '.join(part.columns)}) "
            f"VALUES ({', '.join('?' * len(part.columns))}){ignoring}",
            rows,
        )


class _SourceRows(_FileRows):
    def select(self, part: Part, columns: Sequence[str], rollout_ids: Sequence[str]) -> Iterator[Row]:
        try:
            yield from super().select(part, columns, rollout_ids)
        except sqlite3.DatabaseError as error:
            raise DamagedRowsError(Damage(f"cannot be read ({error})", rollout_ids[0])) from error


class FileSource:
    """Reads a file, in short transactions while others write it; see ``Source``."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def count(self) -> int:
        """See ``Source``."""
        return int(self._connection.execute("SELECT count(*) FROM rollouts").fetchone()[0])

    def page(self, after: str, limit: int) -> list[tuple[str, int]]:
        """See ``Source``."""
        return self._connection.execute(_PAGE, {"after": after, "limit": limit}).fetchall()

    def listed(self, rollout_ids: Sequence[str]) -> list[tuple[str, int]]:
        """See ``Source``."""
        return self._connection.execute(_LISTED, {"rollout_ids": json.dumps(rollout_ids)}).fetchall()

    @contextmanager
    def state(self) -> Iterator[_SourceRows]:
        """See ``Source``."""
        with transaction(self._connection):
            yield _SourceRows(self._connection)


class FileTarget:
    """Writes a file, taking turns with others that write it; see ``Target``."""

    def __init__(self, work: Maintenance) -> None:
        self._work = work
        self._checkpoint_at = CHECKPOINT_BYTES

    @contextmanager
    def transaction(self) -> Iterator[_FileRows]:
        """See ``Target``."""
        with self._work.transaction():
            yield _FileRows(self._work.connection)
        size = wal_bytes(self._work.path)
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
        yield FileSource(connection)


@contextmanager
def file_target(path: Path) -> Iterator[FileTarget]:
    """Open a file for writing; it is made if it is missing.

    Raises:
        UnusableDatabaseError: it cannot be used.
    """
    with maintenance(path, create=True) as work:
        yield FileTarget(work)
