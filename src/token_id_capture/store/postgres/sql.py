"""Anybody's SELECT on a server: it may read what its role may, and changes nothing.

Each statement runs by itself in a transaction that is read-only, ends after a time, and belongs to a role if one is
named. What only a role can forbid, such as functions of a superuser that reach beyond the database, it forbids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain, islice
from typing import Any, Final, NoReturn

import orjson
import psycopg
from psycopg import sql

from token_id_capture.errors import StatementError
from token_id_capture.store.postgres.connection import ServerConnection
from token_id_capture.store.postgres.direct import read_only_server
from token_id_capture.store.read.sql import FIRST_WORD, READING_WORDS, ROWS_AT_A_TIME
from token_id_capture.store.server_url import ServerUrl

_SHOWING: Final = READING_WORDS | {"SHOW", "TABLE"}


@dataclass(frozen=True, slots=True)
class SqlLimits:
    """What a statement may take, and as whom it runs."""

    seconds: float
    role: str | None = None


class ServerSqlReader:
    """Runs one statement after another, each in a transaction that cannot write."""

    def __init__(self, connection: ServerConnection, limits: SqlLimits, should_stop: Callable[[], bool]) -> None:
        self._raw = connection.raw
        self._limits = limits
        self._should_stop = should_stop

    @contextmanager
    def query(self, statement: str) -> Iterator[tuple[list[str], Iterator[list[tuple[Any, ...]]]]]:
        """Run one statement: the names of its columns, and its rows, some at a time.

        The transaction lasts until the rows are read or the block ends, whatever comes first.

        Raises:
            StatementError: it does not read only, takes too long, or cannot be run.
            InterruptedError: ``should_stop`` became true.
        """
        found = FIRST_WORD.match(statement)
        word = "" if found is None else found[1].upper()
        if not word:
            raise StatementError("there is no statement to run: write one, as in 'SELECT * FROM rollout_overview'")
        if word not in _SHOWING:
            raise StatementError(f"{word} is refused: only statements that read are run")
        try:
            self._begin()
            with self._raw.cursor() as cursor:
                rows = cursor.stream(statement.encode())
                # The columns are known with the first row, or with the end.
                first = list(islice(rows, 1))
                columns = [column.name for column in cursor.description or ()]
                yield columns, self._pages(chain(first, rows))
        except psycopg.Error as error:
            self._explain(error)
        finally:
            if not self._raw.closed:
                self._raw.rollback()

    def _begin(self) -> None:
        self._raw.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        milliseconds = sql.Literal(f"{int(self._limits.seconds * 1000)}")
        self._raw.execute(sql.SQL("SET LOCAL statement_timeout = {}").format(milliseconds))
        if self._limits.role is not None:
            self._raw.execute(sql.SQL("SET LOCAL ROLE {}").format(sql.Identifier(self._limits.role)))

    def _pages(self, rows: Iterator[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
        try:
            while page := list(islice(rows, ROWS_AT_A_TIME)):
                if self._should_stop():
                    raise InterruptedError("the query was stopped")
                yield [tuple(map(_plain, row)) for row in page]
        except psycopg.Error as error:
            self._explain(error)

    def _explain(self, error: psycopg.Error) -> NoReturn:
        text = " ".join(str(error.diag.message_primary or error).split())
        problem = f"the statement cannot be run: {text}"
        if error.sqlstate == "57014":
            problem = f"the statement took longer than {self._limits.seconds:g} s: raise --timeout"
        elif error.sqlstate == "25006":
            problem = f"only statements that read are run: {text}"
        elif "multiple commands" in text:
            problem = "there is more than one statement: give them one by one"
        elif "supplies 0 parameters" in text:
            problem = "the statement has parameters: write their values instead"
        raise StatementError(problem) from error


@contextmanager
def server_sql_reader(url: ServerUrl, limits: SqlLimits, should_stop: Callable[[], bool]) -> Iterator[ServerSqlReader]:
    """Open a database on a server for statements. ``should_stop`` is asked between rows, and ends a query if true.

    Raises:
        UnusableDatabaseError: it cannot be reached, or has no tables that this release reads.
    """
    with read_only_server(url) as connection:
        yield ServerSqlReader(connection, limits, should_stop)


def _plain(value: Any) -> Any:
    """A value as SQLite would give it: numbers, text and bytes."""
    if value is None or isinstance(value, int | float | str | bytes):
        return value
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return orjson.dumps(value).decode() if isinstance(value, list | dict) else str(value)
