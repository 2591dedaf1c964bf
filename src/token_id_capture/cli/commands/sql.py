"""``tokcap sql``: a SELECT on the capture database, without a way to change it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from token_id_capture.cli.options import DatabaseOption, JsonOption, fail

if TYPE_CHECKING:
    from token_id_capture.store.postgres.sql import ServerSqlReader
    from token_id_capture.store.read.sql import SqlReader

STDIN = "-"


def sql(
    database: DatabaseOption,
    statement: Annotated[
        str,
        typer.Argument(
            metavar="[STATEMENT]",
            help="One SQL statement that only reads; without it, or with -, it comes from a pipe.",
        ),
    ] = STDIN,
    json: JsonOption = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values instead of a table.")] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.001, help="On a server, end it after this time.")
    ] = 60.0,
    role: Annotated[
        str | None, typer.Option("--role", metavar="NAME", help="On a server, run it as this role.")
    ] = None,
) -> None:
    """Run one SQL statement that only reads, on a live database.

    Statements that would write, attach another file or load code are refused. Start with the views rollout_overview,
    kept_evidence, lost_calls, late_calls, call_chain and call_tokens. token_ids(blob) and log_probs(blob)
    decode the columns prompt_suffix, generation and log_probs to JSON arrays. A table shows a blob as its
    size; --json and --csv print it in hexadecimal. Times of the views are in UTC.
    """
    from token_id_capture.cli.output import result_formats
    from token_id_capture.cli.output.spool import Spool

    if json and csv:
        fail("--json and --csv contradict each other: give one of them")
    present = result_formats.as_json if json else result_formats.as_csv if csv else result_formats.as_table
    text = _from_stdin() if statement == STDIN else statement
    sys.stdout.flush()
    try:
        with (
            Spool(sys.stdout.fileno()) as spool,
            _reader(database, timeout, role, lambda: spool.failed) as reader,
            reader.query(text) as (columns, pages),
        ):
            for piece in present(columns, pages):
                spool.write(piece.encode())
    except BrokenPipeError:
        raise
    except OSError as error:
        fail(f"the result cannot be written: {error.strerror or error}")


@contextmanager
def _reader(
    database: str, timeout: float, role: str | None, should_stop: Callable[[], bool]
) -> Iterator[SqlReader | ServerSqlReader]:
    from token_id_capture.store.reading import location_of
    from token_id_capture.store.server_url import ServerUrl

    location = location_of(database)
    if isinstance(location, ServerUrl):
        from token_id_capture.store.postgres.sql import SqlLimits, server_sql_reader

        with server_sql_reader(location, SqlLimits(timeout, role), should_stop) as server:
            yield server
        return
    if role is not None:
        fail("--role is for a server: a file has no roles")
    from token_id_capture.store.read.sql import sql_reader

    with sql_reader(location, should_stop) as file:
        yield file


def _from_stdin() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        fail("there is no statement: give one, as in tokcap sql 'SELECT * FROM rollout_overview LIMIT 20'")
    return sys.stdin.buffer.read().decode(errors="replace")
