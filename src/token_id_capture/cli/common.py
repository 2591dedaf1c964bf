"""What the commands share: options, output, and how an error reaches a person.

Commands print results on standard output and everything else on standard error. A refusal is one
line and an exit code: 1 when some of the work could not be done, 2 when nothing could.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import orjson
import typer
from rich.console import Console

_Result = TypeVar("_Result")

EXIT_PARTIAL = 1
EXIT_UNUSABLE = 2

DatabaseOption = Annotated[
    Path,
    typer.Option(
        "--database",
        "-d",
        envvar="TOKCAP_DATABASE",
        help="The capture database: a file, or a directory that holds token_captures.db.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of tables.")]


def output_console() -> Console:
    """Standard output; plain text when it is no terminal."""
    return Console(highlight=False)


def error_console() -> Console:
    """Standard error; plain text when it is no terminal."""
    return Console(stderr=True, highlight=False)


def fail(message: str, code: int = EXIT_UNUSABLE) -> NoReturn:
    """End the command with one line on standard error and this exit code."""
    print(f"tokcap: {message}", file=sys.stderr)
    raise typer.Exit(code)


def print_json(value: Any) -> None:
    """Print one JSON document on standard output."""
    sys.stdout.buffer.write(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    sys.stdout.buffer.flush()


def run(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run the command's coroutine."""
    return asyncio.run(work)
