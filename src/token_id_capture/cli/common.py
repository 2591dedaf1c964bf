"""What the commands share: options, output, and how an error reaches a person.

Commands print results on standard output and everything else on standard error. A refusal is one
line and an exit code: 1 when some of the work could not be done, 2 when nothing could.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

_Result = TypeVar("_Result")

EXIT_PARTIAL = 1
EXIT_UNUSABLE = 2

# A pipe gets whole lines, however long: grep and awk cannot join what was wrapped.
_WIDTH_WITHOUT_TERMINAL = 4000


def _database_path(value: str) -> Path:
    from token_id_capture.store.location import database_path

    return database_path(value)


DatabaseOption = Annotated[
    Path,
    typer.Option(
        "--database",
        "-d",
        envvar="TOKCAP_DATABASE",
        metavar="PATH",
        parser=_database_path,
        help="The capture database: a file, or a directory that holds token_captures.db.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of tables.")]


def output_console() -> Console:
    """Standard output; plain text, as wide as it needs to be, when it is no terminal."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDTH_WITHOUT_TERMINAL
    return console


def error_console() -> Console:
    """Standard error; plain text when it is no terminal."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def print_table(console: Console, headers: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """Print a plain table: numbers to the right, the first column never cut, None as ``-``."""
    from rich.table import Table

    shown = [[_cell(value) for value in row] for row in rows]
    numeric = [all(isinstance(row[column], int | None) for row in rows) for column in range(len(headers))]
    table = Table(box=None, pad_edge=False, title=title or None, title_justify="left", header_style="bold")
    for position, header in enumerate(headers):
        table.add_column(header, justify="right" if numeric[position] else "left", overflow="fold")
    for row in shown:
        table.add_row(*row)
    console.print(table)


def printable(text: str) -> str:
    """``text`` with control characters escaped: what an engine sent must not steer a terminal."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def local_time(seconds: float | None) -> str:
    """Seconds since the epoch as a local date and time."""
    if seconds is None:
        return "-"
    return datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="seconds")


def _cell(value: object) -> str:
    return "-" if value is None or value == "" else printable(str(value))


def report(message: str) -> None:
    """One line on standard error."""
    print(f"tokcap: {printable(message)}", file=sys.stderr)


def fail(message: str, code: int = EXIT_UNUSABLE) -> NoReturn:
    """End the command with one line on standard error and this exit code."""
    report(message)
    raise typer.Exit(code)


def print_json(value: Any) -> None:
    """Print one JSON document on standard output."""
    import orjson

    sys.stdout.buffer.write(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    sys.stdout.buffer.flush()


def run(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run the command's coroutine."""
    return asyncio.run(work)
