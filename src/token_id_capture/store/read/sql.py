"""Anybody's SELECT on a live database: it may read everything, and changes nothing.

Three tombstones, of which each alone would do: the connection is opened read-only, ``query_only`` is
on, and an authorizer lets only reading through, already when the statement is compiled. So a
refusal names what was refused.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NoReturn

import orjson

from token_id_capture.errors import InvalidEntryError, StatementError
from token_id_capture.store.file.read_only import read_only
from token_id_capture.tokens import LogProbs, TokenIds

ROWS_AT_A_TIME: Final = 256

# How many instructions of SQLite's machine pass between two looks at whether to continue: milliseconds.
_INSTRUCTIONS: Final = 100_000

_READING: Final = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
_REFUSED_FUNCTIONS: Final = {"load_extension", "fts3_tokenizer"}
_PRAGMAS_ABOUT_A_TABLE: Final = {
    *("foreign_key_check", "foreign_key_list", "index_info", "index_list", "index_xinfo", "integrity_check"),
    *("quick_check", "table_info", "table_list", "table_xinfo"),
}
# Without an argument these only answer; with one, some of them set something.
_PRAGMAS_THAT_ANSWER: Final = _PRAGMAS_ABOUT_A_TABLE | {
    *("application_id", "auto_vacuum", "collation_list", "compile_options", "data_version", "database_list"),
    *("encoding", "freelist_count", "function_list", "journal_mode", "module_list", "page_count", "page_size"),
    *("pragma_list", "query_only", "schema_version", "user_version"),
}

# SQLite declares these on first use, which the authorizer would take for a change of the schema.
_TABLE_FUNCTIONS: Final = (
    "dbstat",
    "json_each",
    "json_tree",
    *(f"pragma_{name}" for name in sorted(_PRAGMAS_THAT_ANSWER)),
)

_WRITES: Final = {
    sqlite3.SQLITE_INSERT: "INSERT",
    sqlite3.SQLITE_UPDATE: "UPDATE",
    sqlite3.SQLITE_DELETE: "DELETE",
}
FIRST_WORD: Final = re.compile(r"(?:\s|--[^\n]*(?:\n|$)|/\*.*?\*/)*([A-Za-z]*)", re.DOTALL)
READING_WORDS: Final = {"", "EXPLAIN", "SELECT", "VALUES", "WITH"}


def _never() -> bool:
    return False


class SqlReader:
    """Runs one statement after another on a connection that cannot write.

    Two functions are added to SQLite's own: ``token_ids(blob)`` and ``log_probs(blob)`` decode a
    column of ``entries`` or ``snapshot_entries`` to a JSON array.
    """

    def __init__(self, connection: sqlite3.Connection, should_stop: Callable[[], bool]) -> None:
        self._connection = connection
        self._should_stop = should_stop
        self._refusal = ""
        self._problem = ""
        connection.text_factory = _text
        connection.create_function("token_ids", 1, self._decoder("token_ids", TokenIds), deterministic=True)
        connection.create_function("log_probs", 1, self._decoder("log_probs", LogProbs), deterministic=True)
        for function in _TABLE_FUNCTIONS:
            with suppress(sqlite3.Error):  # not every build of SQLite has them all
                connection.execute(f"SELECT 1 FROM {function} LIMIT 0")
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.set_progress_handler(self._stops, _INSTRUCTIONS)
        connection.set_authorizer(self._authorize)

    @contextmanager
    def query(self, statement: str) -> Iterator[tuple[list[str], Iterator[list[tuple[Any, ...]]]]]:
        """Run one statement: the names of its columns, and its rows, some at a time.

        The transaction lasts until the rows are read or the block ends, whatever comes first.

        Raises:
            StatementError: it does not compile, does not read only, or fails on some row.
            KeyboardInterrupt: somebody pressed Ctrl-C while SQLite was at work.
            InterruptedError: ``should_stop`` became true.
        """
        self._refusal = self._problem = ""
        try:
            cursor = self._connection.execute(statement)
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            self._explain(error, statement)
        try:
            if cursor.description is None:
                raise StatementError("there is no statement to run: write one, as in 'SELECT * FROM rollout_overview'")
            yield [str(column[0]) for column in cursor.description], self._pages(cursor, statement)
        finally:
            cursor.close()

    def _pages(self, cursor: sqlite3.Cursor, statement: str) -> Iterator[list[tuple[Any, ...]]]:
        try:
            while page := cursor.fetchmany(ROWS_AT_A_TIME):
                yield page
        except sqlite3.Error as error:
            self._explain(error, statement)

    def _explain(self, error: Exception, statement: str) -> NoReturn:
        if getattr(error, "sqlite_errorname", "") == "SQLITE_INTERRUPT":
            if self._should_stop():
                raise InterruptedError("the query was stopped") from error
            raise KeyboardInterrupt from error
        if self._refusal:
            word = FIRST_WORD.match(statement)
            if word is not None and word[1].upper() not in READING_WORDS | {"PRAGMA"}:
                self._refusal = word[1].upper()
            raise StatementError(f"{self._refusal} is refused: only statements that read are run") from error
        if "one statement at a time" in str(error):
            raise StatementError("there is more than one statement: give them one by one") from error
        if "number of bindings" in str(error):
            raise StatementError("the statement has parameters: write their values instead") from error
        raise StatementError(f"the statement cannot be run: {self._problem or error}") from error

    def _stops(self) -> bool:
        # A Python function, so that Ctrl-C is noticed here, in the middle of a query: SQLite then
        # ends it as interrupted, and what this function raised is forgotten.
        return self._should_stop()

    def _authorize(self, action: int, first: str | None, second: str | None, *where: str | None) -> int:
        if action in _READING:
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_FUNCTION and second not in _REFUSED_FUNCTIONS:
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_PRAGMA:
            pragma = (first or "").lower()
            if pragma in _PRAGMAS_ABOUT_A_TABLE or (second is None and pragma in _PRAGMAS_THAT_ANSWER):
                return sqlite3.SQLITE_OK
            self._refusal = f"PRAGMA {pragma}"
        elif action == sqlite3.SQLITE_FUNCTION:
            self._refusal = f"the function {second}"
        else:
            self._refusal = self._refusal or f"{_WRITES.get(action, 'what it does to')} {first or 'the database'}"
        return sqlite3.SQLITE_DENY

    def _decoder(self, name: str, packed: type[TokenIds] | type[LogProbs]) -> Callable[[Any], str | None]:
        def decode(blob: Any) -> str | None:
            if blob is None:
                return None
            if not isinstance(blob, bytes):
                self._problem = f"{name}() takes a blob, such as entries.generation, not {type(blob).__name__}"
                raise ValueError(self._problem)
            try:
                return orjson.dumps(packed.from_bytes(blob).tolist()).decode()
            except InvalidEntryError as error:
                self._problem = f"{name}(): {error}"
                raise

        return decode


@contextmanager
def sql_reader(path: Path, should_stop: Callable[[], bool] = _never) -> Iterator[SqlReader]:
    """Open the database for statements. ``should_stop`` is asked often, and ends a query if true.

    Raises:
        UnusableDatabaseError: it is missing, or no capture database that this release reads.
    """
    with read_only(path) as connection:
        yield SqlReader(connection, should_stop)


def _text(raw: bytes) -> str:
    # Text that is no UTF-8 can only come from another program; it is shown, not a reason to fail.
    return raw.decode(errors="replace")
