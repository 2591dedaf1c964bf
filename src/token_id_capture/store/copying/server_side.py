"""A PostgreSQL database as the source or the target of a copy."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import psycopg
from psycopg import sql
from psycopg.types.numeric import Int4BinaryDumper

from token_id_capture.store.copying.parts import WRITERS, LeftOutError, Part, Row, TryAgainError
from token_id_capture.store.copying.statements import AMONG, COUNT, LISTED, OF_WRITERS, PAGE
from token_id_capture.store.maintain.verification import Damage
from token_id_capture.store.postgres.connection import ServerConnection, in_postgres
from token_id_capture.store.postgres.direct import connected
from token_id_capture.store.postgres.errors import is_undone
from token_id_capture.store.postgres.migrate import migrate
from token_id_capture.store.postgres.schema import postgres_metadata
from token_id_capture.store.postgres.session import check_server, file_id_of
from token_id_capture.store.server_url import ServerUrl

_ROWS_AT_ONCE: Final = 32
"""Rows that come over the network together, of which one may have megabytes."""
_HEADS_AT_ONCE: Final = 2_000

_NUMBERS: Final = ("rowid", "flag_id", "snapshot_flag_id", "outcome_id")
_BEGIN_READING: Final = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_PATIENCE: Final = "SET LOCAL lock_timeout = '30s'"


@cache
def _types() -> dict[str, dict[str, str]]:
    """The type of each column of each table, as PostgreSQL names it."""
    names = {"TEXT": "text", "BYTEA": "bytea", "DOUBLE PRECISION": "float8", "INTEGER": "int4", "BIGINT": "int8"}
    return {
        table.name: {column.name: names[str(column.type).partition(" COLLATE")[0]] for column in table.columns}
        for table in postgres_metadata().tables.values()
    }


@cache
def _selection(part: Part, columns: Sequence[str]) -> bytes:
    name = part.table.name
    found = OF_WRITERS if part is WRITERS else f"rollout_id {AMONG}"
    order = [number for number in _NUMBERS if number in _types()[name]]
    ordered = f" ORDER BY {', '.join(order)}" if order else ""
    return in_postgres(f"SELECT {', '.join(columns)} FROM {name} WHERE {found}{ordered}")


class _ServerRows:
    """Rows as one transaction sees them."""

    def __init__(self, connection: ServerConnection) -> None:
        self._raw = connection.raw

    def select(self, part: Part, columns: Sequence[str], rollout_ids: Sequence[str]) -> Iterator[Row]:
        """See ``Rows``."""
        whole = part.holds_calls and columns == part.columns
        with self._raw.cursor(name="copied") as cursor:
            cursor.itersize = _ROWS_AT_ONCE if whole else _HEADS_AT_ONCE
            cursor.execute(_selection(part, columns), {"rollout_ids": json.dumps(rollout_ids)}, binary=True)
            yield from cursor

    def insert(self, part: Part, rows: Iterable[Row]) -> None:
        """See ``WritableRows``."""
        if part is WRITERS:
            self._insert_writers(rows)
            return
        first = next(iter(rows := iter(rows)), None)
        if first is None:
            return
        names = sql.SQL(", ").join(map(sql.Identifier, part.columns))
        statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT BINARY)").format(sql.Identifier(part.table.name), names)
        try:
            self._copy_in(statement, part, itertools.chain((first,), rows))
        except (psycopg.DataError, psycopg.errors.CheckViolation) as error:
            # Text in a file may hold a NUL character, and text of this server cannot.
            what = " ".join(str(error).split())
            raise LeftOutError(Damage(f"PostgreSQL cannot store it ({what})", first[0])) from error

    def _copy_in(self, statement: sql.Composed, part: Part, rows: Iterable[Row]) -> None:
        cursor = self._raw.cursor()
        # The connection has one of its own for this type, which takes flags alone.
        cursor.adapters.register_dumper(int, Int4BinaryDumper)
        with cursor, cursor.copy(statement) as copy:
            copy.set_types([_types()[part.table.name][name] for name in part.columns])
            for row in rows:
                copy.write_row(row)

    def _insert_writers(self, rows: Iterable[Row]) -> None:
        values = ", ".join(["%s"] * len(WRITERS.columns))
        self._raw.cursor().executemany(
            f"INSERT INTO writers ({', '.join(WRITERS.columns)}, committed) VALUES ({values}, 0) "
            "ON CONFLICT DO NOTHING",
            sorted(rows),
        )


class _Server:
    def __init__(self, url: ServerUrl, connection: ServerConnection) -> None:
        self._url = url
        self._connection = connection

    def __str__(self) -> str:
        return str(self._url)

    def identity(self) -> object:
        """See ``Side``."""
        return file_id_of(self._connection, self._url)


class ServerSource(_Server):
    """Reads a database on a server; see ``Source``."""

    def count(self) -> int:
        """See ``Source``."""
        return int(self._rows(COUNT)[0][0])

    def page(self, after: str, limit: int) -> list[tuple[str, int]]:
        """See ``Source``."""
        return self._rows(PAGE, after=after, limit=limit)

    def listed(self, rollout_ids: Sequence[str]) -> list[tuple[str, int]]:
        """See ``Source``."""
        return self._rows(LISTED, rollout_ids=json.dumps(rollout_ids))

    @contextmanager
    def state(self) -> Iterator[_ServerRows]:
        """See ``Source``."""
        with self._connection.reading():
            yield _ServerRows(self._connection)

    def _rows(self, statement: str, **parameters: Any) -> list[Any]:
        return self._connection.execute(statement, parameters).fetchall()


class ServerTarget(_Server):
    """Writes a database on a server; see ``Target``."""

    @contextmanager
    def transaction(self) -> Iterator[_ServerRows]:
        """See ``Target``."""
        try:
            with self._connection.raw.transaction():
                self._connection.raw.execute(_PATIENCE)
                yield _ServerRows(self._connection)
        except psycopg.errors.UniqueViolation as error:
            raise TryAgainError from error
        except psycopg.Error as error:
            if is_undone(error):
                raise TryAgainError from error
            raise


@contextmanager
def server_source(url: ServerUrl) -> Iterator[ServerSource]:
    """Connect for reading; a database of an older release is brought up to date first.

    Raises:
        UnusableDatabaseError: it is missing or cannot be used.
    """
    with connected(url) as connection:
        migrate(connection, url, create=False)
        yield ServerSource(url, connection)


@contextmanager
def server_target(url: ServerUrl) -> Iterator[ServerTarget]:
    """Connect for writing; the tables are made if they are missing.

    Raises:
        UnusableDatabaseError: it cannot be used.
    """
    with connected(url) as connection:
        check_server(connection, url)
        migrate(connection, url, create=True)
        yield ServerTarget(url, connection)
