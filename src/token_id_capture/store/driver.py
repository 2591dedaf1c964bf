"""What this package asks of a driver: the words of ``sqlite3``, which connections to a server have too."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias


class Result(Protocol):
    """What a statement gave."""

    def fetchone(self) -> Any:
        """The next row, or None."""
        ...

    def fetchall(self) -> Sequence[Any]:
        """All rows that are left."""
        ...


class Cursor(Result, Protocol):
    """The same, row by row or counted."""

    @property
    def rowcount(self) -> int:
        """How many rows the statement changed."""
        ...

    @property
    def description(self) -> Any:
        """The columns, each beginning with its name; None if the statement gives no rows."""
        ...

    def fetchall(self) -> list[Any]:
        """All rows that are left."""
        ...

    def __iter__(self) -> Iterator[Any]:
        """All rows that are left, one by one."""
        ...


class Connection(Protocol):
    """A connection. Each statement commits by itself outside a transaction that was begun."""

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction was begun and has not ended."""
        ...

    def execute(self, statement: str, parameters: Any = ..., /) -> Cursor:
        """Run one statement of SQLite, whose parameters are named or in their order."""
        ...

    def executemany(self, statement: str, rows: Any, /) -> Any:
        """Run one statement for each row of parameters."""
        ...

    def getlimit(self, category: int, /) -> int:
        """A limit of statements, by SQLite's number for it."""
        ...


def is_damage(error: Exception) -> bool:
    """Whether a driver says that stored rows cannot be read: SQLite by the class, PostgreSQL by the code of the error,
    and of what follows it in a transaction (https://www.postgresql.org/docs/current/errcodes-appendix.html)."""
    return isinstance(error, sqlite3.DatabaseError) or str(getattr(error, "sqlstate", "")).startswith(("XX", "25P02"))


def by_name(cursor: Cursor) -> list[dict[str, Any]]:
    """All rows that are left, with their columns by name."""
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


Execute: TypeAlias = Callable[[str, Mapping[str, Any]], Result]
"""``execute`` of a connection, or what runs the same text and names with SQLAlchemy."""
