"""``tokcap sql``: a SELECT on the capture database, without a way to change it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from token_id_capture.cli.options import DatabaseOption, JsonOption, fail
from token_id_capture.cli.output.database import database_file

STDIN = "-"


def sql(
    database: DatabaseOption,
    statement: Annotated[
        str, typer.Argument(metavar="[STATEMENT]", help="One SQL statement that reads; - or nothing reads a pipe.")
    ] = STDIN,
    json: JsonOption = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values instead of a table.")] = False,
) -> None:
    """Run one SQL statement that only reads, on a live database.

    Whatever would write, attach another file or load code is refused. Start with the views rollout_overview,
    kept_evidence, lost_calls, late_calls, call_chain and call_tokens. token_ids(blob) and log_probs(blob)
    decode the columns prompt_suffix, generation and log_probs to JSON arrays. A table shows a blob as its
    size; --json and --csv print it in hexadecimal. Times of the views are in UTC.
    """
    from token_id_capture.cli.output import result_formats
    from token_id_capture.cli.output.spool import Spool
    from token_id_capture.store.read.sql import sql_reader

    if json and csv:
        fail("--json and --csv contradict each other: give one of them")
    present = result_formats.as_json if json else result_formats.as_csv if csv else result_formats.as_table
    text = _from_stdin() if statement == STDIN else statement
    sys.stdout.flush()
    try:
        with (
            Spool(sys.stdout.fileno()) as spool,
            sql_reader(database_file(database), lambda: spool.failed) as reader,
            reader.query(text) as (columns, pages),
        ):
            for piece in present(columns, pages):
                spool.write(piece.encode())
    except BrokenPipeError:
        raise
    except OSError as error:
        fail(f"the result cannot be written: {error.strerror or error}")


def _from_stdin() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        fail("there is no statement: give one, as in tokcap sql 'SELECT * FROM rollout_overview LIMIT 20'")
    return sys.stdin.buffer.read().decode(errors="replace")
