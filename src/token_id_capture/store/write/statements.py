"""Core statements, compiled once.

SQLAlchemy spends tens of microseconds on each execution, more than SQLite needs for most of these
statements, and the writer executes a dozen of them a commit. So each statement is built with Core
from the tables of ``schema``, compiled when its module is imported, and executed by the driver.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, cast

from sqlalchemy.dialects.sqlite.pysqlite import dialect as sqlite_dialect
from sqlalchemy.sql import ClauseElement, Insert

from token_id_capture.store.driver import Connection

_ROWS_AT_ONCE: Final = 64
_VALUES = re.compile(r"VALUES (\((?::\w+(?:, )?)+\))")
_PLACE = re.compile(r":(\w+)")
_DIALECT = sqlite_dialect(paramstyle="named")


class RemoteConnection(Protocol):
    """A connection to which each statement is a journey."""

    def run_together(self, statements: Sequence[tuple[str, Mapping[str, Any]]], /) -> list[int]:
        """Run statements that answer no rows, in order and in one journey; how many rows each changed."""
        ...


class Statement:
    """One statement; its parameters are given by name."""

    __slots__ = ("_defaults", "_many", "_values", "sql")

    def __init__(self, clause: ClauseElement, columns: Sequence[str] | None = None) -> None:
        """``columns`` are those that an INSERT gives values for; all of its table's by default."""
        if isinstance(clause, Insert) and columns is None and clause.select is None:
            columns = clause.table.columns.keys()
        compiled = clause.compile(dialect=_DIALECT, column_keys=columns)
        self.sql = str(compiled)
        self._defaults = {name: value for name, value in compiled.params.items() if value is not None}
        values = _VALUES.search(self.sql) if isinstance(clause, Insert) else None
        self._many: dict[int, str] = {}
        self._values = None if values is None else (values[1], tuple(_PLACE.findall(values[1])))

    def run(self, connection: Connection, parameters: Mapping[str, Any]) -> int:
        """Execute it; the answer is the number of rows that it changed."""
        return connection.execute(self.sql, {**self._defaults, **parameters}).rowcount

    def filled(self, parameters: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Its text and all its parameters."""
        return self.sql, {**self._defaults, **parameters}

    def run_many(self, connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
        """Execute it for each row of parameters; an INSERT takes many rows at once.

        The driver gives the interpreter lock away at each step of a statement, and a busy event loop
        gives it back milliseconds later. So the fewer steps, the sooner a group is committed.
        """
        if self._defaults:
            rows = [{**self._defaults, **row} for row in rows]
        if self._values is None:
            connection.executemany(self.sql, rows)
            return
        values, names = self._values
        # SQLite can be built to take few parameters, and then refuses the statement.
        most = connection.getlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER) // len(names)
        start = 0
        while start < len(rows):
            # Few different texts, so that the driver finds them prepared.
            count = min(1 << (len(rows) - start).bit_length() - 1, _ROWS_AT_ONCE, max(most, 1))
            block = rows[start : start + count]
            sql = self._many.get(count)
            if sql is None:
                sql = self._many[count] = self.sql.replace(values, ", ".join([_PLACE.sub("?", values)] * count), 1)
            connection.execute(sql, [row[name] for row in block for name in names])
            start += count

    def rows(self, connection: Connection, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """Execute it; the answer is all rows."""
        return connection.execute(self.sql, {**self._defaults, **parameters}).fetchall()

    def row(self, connection: Connection, parameters: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """Execute it; the answer is the first row, or None."""
        row: tuple[Any, ...] | None = connection.execute(self.sql, {**self._defaults, **parameters}).fetchone()
        return row


def remote(connection: Connection) -> RemoteConnection | None:
    """The connection, if it leads to a server.

    Not a look at the protocol's methods, which takes Python 3.11 longer than many a statement.
    """
    return None if isinstance(connection, sqlite3.Connection) else cast(RemoteConnection, connection)


def run_all(connection: Connection, statements: Sequence[Statement], parameters: Mapping[str, Any]) -> list[int]:
    """Execute these in order, with the same parameters; how many rows each changed."""
    if server := remote(connection):
        return server.run_together([statement.filled(parameters) for statement in statements])
    return [statement.run(connection, parameters) for statement in statements]
