"""A connection of psycopg on which the statements of this package run as they are.

They are written for SQLite in words that PostgreSQL understands too; the schema has functions for the few that it
lacks. What is left: how a parameter is marked, that a condition by ``rowid`` has to be one by the key, and that a
snapshot's copies name their rollout.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final, TypeAlias

import psycopg
from psycopg.abc import Buffer
from psycopg.adapt import Dumper
from psycopg.pq import TransactionStatus
from psycopg.types.numeric import Int4BinaryDumper

from token_id_capture.store.write import snapshot
from token_id_capture.store.write.entries import SELECT_ROLLOUTS
from token_id_capture.store.write.process import SEEN

Parameters: TypeAlias = Mapping[str, Any] | Sequence[Any]

MOST_PARAMETERS: Final = 65_535
"""The protocol counts them in two bytes."""

# A text literal, a cast, a named or a numbered parameter, and what psycopg would take for one.
_WORD: Final = re.compile(r"'[^']*'|::|:([a-z_]\w*)|\?|%", re.ASCII)
_BY_ROWID: Final = re.compile(r"(?:\w+\.)?rowid IN \(SELECT rowid FROM \w+ WHERE ([^()]*)\)")
_COPIES: Final = {one.sql for one in (snapshot.COPY_ENTRIES, snapshot.COPY_FLAGS, snapshot.COPY_OPEN_INTENTS)}
_INSTEAD: Final = {
    SELECT_ROLLOUTS.sql: """
        SELECT coalesce(json_agg(json_build_array(rollout_id, incarnation, state)), '[]')::text FROM rollouts
        WHERE rollout_id IN (SELECT value FROM json_each(:rollout_ids))
    """,
    # The server's clock, which all hosts have in common.
    SEEN.sql: "UPDATE writers SET last_seen_at = extract(epoch FROM clock_timestamp()) WHERE writer_id = :this_writer",
    "BEGIN": "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY",
}


@lru_cache(maxsize=1024)
def in_postgres(statement: str) -> bytes:
    """A statement of this package as psycopg takes it for PostgreSQL."""
    text = _INSTEAD.get(statement, statement)
    if statement in _COPIES:
        text = text.replace("(snapshot_id,", "(rollout_id, snapshot_id,", 1).replace("SELECT ", "SELECT :rollout, ", 1)
    return _WORD.sub(_marked, _BY_ROWID.sub(r"\1", text)).encode()


def _marked(found: re.Match[str]) -> str:
    if found[1]:
        return f"%({found[1]})s"
    return "%s" if found[0] == "?" else found[0].replace("%", "%%")


class _Flag(Dumper):
    """True and false as 1 and 0: columns of both are integers, as in SQLite."""

    format = Int4BinaryDumper.format
    oid = Int4BinaryDumper.oid

    def dump(self, obj: bool) -> Buffer:
        return b"\0\0\0\1" if obj else b"\0\0\0\0"


class Answer:
    """What a statement answered, as a cursor has it. All its rows are here, and a later statement takes none away."""

    __slots__ = ("_result", "_rows", "rowcount", "statusmessage")

    def __init__(self, cursor: psycopg.Cursor[Any]) -> None:
        self._result = cursor.pgresult
        self.rowcount = cursor.rowcount
        self.statusmessage = cursor.statusmessage
        self._rows = iter(() if cursor.rownumber is None else cursor.fetchall())

    @property
    def description(self) -> list[tuple[str]] | None:
        """The columns, each with its name alone; None if the statement gives no rows."""
        if self._result is None or not self._result.nfields:
            return None
        return [((self._result.fname(column) or b"").decode(),) for column in range(self._result.nfields)]

    def fetchone(self) -> Any:
        """The next row, or None."""
        return next(self._rows, None)

    def fetchall(self) -> list[Any]:
        """All rows that are left."""
        return list(self._rows)

    def __iter__(self) -> Iterator[Any]:
        return self._rows


class ServerConnection:
    """What ``sqlite3.Connection`` has, as far as statements of this package use it. Each statement commits by itself
    outside a transaction that was begun."""

    def __init__(self, raw: psycopg.Connection[Any]) -> None:
        self.raw = raw
        raw.adapters.register_dumper(bool, _Flag)
        # One for all statements: to make another takes as long as a small statement.
        self._cursor = raw.cursor()
        self._several = psycopg.ClientCursor(raw)

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction was begun and has not ended."""
        return self.raw.info.transaction_status in (TransactionStatus.INTRANS, TransactionStatus.INERROR)

    @property
    def usable(self) -> bool:
        """Whether the server still answers on it, as far as anybody has noticed."""
        return not self.raw.closed and self.raw.info.transaction_status != TransactionStatus.UNKNOWN

    def execute(self, statement: str, parameters: Parameters = ()) -> Answer:
        """Run one statement; all its rows are here when this returns."""
        return Answer(self._cursor.execute(in_postgres(statement), parameters, binary=True))

    def run_together(self, statements: Sequence[tuple[str, Mapping[str, Any]]], /) -> list[int]:
        """Run statements that answer no rows, in order and in one journey; how many rows each changed."""
        cursor = self._several
        texts = [cursor.mogrify(in_postgres(statement), parameters) for statement, parameters in statements]
        cursor.execute("; ".join(texts).encode())
        changed = [cursor.rowcount]
        while cursor.nextset():
            changed.append(cursor.rowcount)
        return changed

    def one(self, statement: str, parameters: Parameters = ()) -> Any:
        """The row of a statement that always gives one."""
        row = self.execute(statement, parameters).fetchone()
        assert row is not None
        return row

    def executemany(self, statement: str, rows: Sequence[Parameters]) -> None:
        """Run a statement for each row of parameters, without waiting for each."""
        if rows:
            self.raw.cursor().executemany(in_postgres(statement), rows)

    def getlimit(self, category: int, /) -> int:
        """How many parameters a statement may have; nothing else of SQLite's limits is asked for."""
        assert category == sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER
        return MOST_PARAMETERS

    @contextmanager
    def reading(self) -> Iterator[None]:
        """All statements inside see one state, and none can write."""
        self.execute("BEGIN")
        try:
            yield
        finally:
            if self.in_transaction:
                self.execute("ROLLBACK")

    def close(self) -> None:
        """Close it; a connection that is lost is closed too."""
        self.raw.close()
