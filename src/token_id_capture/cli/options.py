"""What the commands share: options, output, and how an error reaches a person.

Commands print results on standard output and everything else on standard error. A refusal is one
line and an exit code: 1 when some of the work could not be done, 2 when nothing could.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import IO, TYPE_CHECKING, Annotated, Any, BinaryIO, Final, Literal, NoReturn, TypeAlias, TypeVar

import typer

from token_id_capture.errors import ConfigurationError
from token_id_capture.lifecycle import Sequences
from token_id_capture.outputs.destination import Destination, FileFormat

if TYPE_CHECKING:
    from rich.console import Console

    from token_id_capture.store import TokenCaptureStore

_Result = TypeVar("_Result")

# C1 controls; what joins, hides or turns text (soft hyphen, zero-width and bidirectional marks, separators); tags.
_STEERING = re.compile(
    "[\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)

EXIT_PARTIAL = 1
EXIT_UNUSABLE = 2
EXIT_INTERRUPTED = 130

LogFormat: TypeAlias = Literal["text", "json"]

_FILE_FORMS: Final = "a file, a directory that holds token_captures.db, an sqlite:/// URL of a file"


def _database_option(forms: str) -> Any:
    # A str, not a Path, which would take the slashes out of a URL.
    help_text = f"The capture database: {forms}."
    return typer.Option("--database", "-d", envvar="TOKCAP_DATABASE", metavar="DATABASE", help=help_text)


DatabaseOption = Annotated[str, _database_option(f"{_FILE_FORMS}, or the postgresql:// URL of a database on a server")]
DatabaseFileOption = Annotated[str, _database_option(f"{_FILE_FORMS}; not one on a server")]
SequencesOption = Annotated[
    Sequences,
    typer.Option(
        "--sequences",
        metavar="main|all",
        help="main: one row per rollout, the main agent's sequence. all: one row per sequence; each sampled token "
        "has loss in exactly one of them.",
    ),
]
ModelsOption = Annotated[
    str | None,
    typer.Option(
        "--models",
        metavar="NAMES",
        help="The models to train, as in policy or policy-*,judge; tokens of others get no loss.",
    ),
]
OUTPUT_FORMS: Final = (
    ".jsonl, also compressed as .jsonl.gz or .jsonl.zst, or .parquet; a URL of fsspec, as in "
    "s3://bucket/rows.parquet; - is standard output."
)
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace the output if it is there already.")]
ShardRowsOption = Annotated[
    int | None,
    typer.Option(
        "--shard-rows",
        min=1,
        metavar="N",
        help="Write files of N rows each: rows-00000.parquet and so on for rows.parquet.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of tables.")]


def model_names(models: str | None) -> tuple[str, ...] | None:
    """The names of ``--models``; None if it was not given, which ends the command if it is empty."""
    if models is None:
        return None
    names = tuple(name.strip() for name in models.split(",") if name.strip())
    return names or fail("--models names no model")


def destination_option(
    output: str, file_format: FileFormat | None, shard_rows: int | None, overwrite: bool, json: bool
) -> Destination:
    """The destination of these options, which ends the command if it cannot be written."""
    try:
        destination = Destination.of(output, file_format, shard_rows, overwrite)
        if destination.is_stdout and json:
            fail("rows and --json cannot both go to standard output: name a file for the rows")
        if destination.is_stdout and destination.file_format is FileFormat.PARQUET and sys.stdout.isatty():
            fail("Parquet cannot go to a terminal: name a file, or redirect standard output to one")
    except ConfigurationError as error:
        fail(str(error))
    return destination


def existing_store(database: str) -> TokenCaptureStore:
    """The store of a database that must be there: a command that looks at one never makes one."""
    from token_id_capture.store import TokenCaptureStore

    return TokenCaptureStore(database, create=False)


def output_console() -> Console:
    """Standard output; plain text when it is not a terminal."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def error_console() -> Console:
    """Standard error; plain text when it is not a terminal."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def printable(text: str) -> str:
    """``text`` with control characters escaped: what an engine sent must not steer a terminal."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def local_time(seconds: float | None) -> str:
    """Seconds since the epoch as a local date and time."""
    if seconds is None:
        return "-"
    return datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="seconds")


def terminal_width() -> int | None:
    """The width of standard output; None for a pipe, which gets whole lines for grep and awk."""
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        return None
    return shutil.get_terminal_size().columns


def wrapped(line: str, room: int | None, hanging: int = 2) -> str:
    """``line`` in lines of at most ``room`` characters, broken between words alone, so that an id or a path can
    be copied; lines after the first are ``hanging`` characters further in."""
    # A terminal that was never told its size says 0.
    if not room or len(line) <= room:
        return line
    import textwrap

    indent = len(line) - len(line.lstrip())
    deeper = indent + hanging if indent + hanging + 10 < room else indent
    return textwrap.fill(
        line.strip(),
        room,
        initial_indent=" " * indent,
        subsequent_indent=" " * deeper,
        break_on_hyphens=False,
        break_long_words=False,
    )


def print_line(line: str, hanging: int = 2) -> None:
    """One line on standard output, wrapped where that is a terminal."""
    print(wrapped(printable(line), terminal_width(), hanging))


def report(message: str) -> None:
    """One line on standard error, wrapped where that is a terminal."""
    room = os.get_terminal_size(sys.stderr.fileno()).columns if sys.stderr.isatty() else None
    print(wrapped(f"tokcap: {printable(message)}", room), file=sys.stderr)


def show_warnings(say: Callable[[str], object]) -> None:
    """Have ``say`` tell the warnings of this process from now on, without where in the code they come from."""

    def show(message: Warning | str, *where: object, **more: object) -> None:
        say(str(message))

    warnings.showwarning = show


def fail(message: str, code: int = EXIT_UNUSABLE) -> NoReturn:
    """End the command with one line on standard error and this exit code."""
    report(message)
    raise typer.Exit(code)


def confirm(question: str, yes: bool) -> None:
    """Continue only if a person agrees, or did with ``--yes``."""
    if yes:
        return
    if not sys.stdin.isatty():
        fail("nothing was removed: without a terminal to ask on, use --yes")
    if not typer.confirm(question, err=True):
        fail("nothing was removed", EXIT_PARTIAL)


def let_others_go_first() -> None:
    """For a command that reads the whole file, in short transactions: servers do not wait for processors."""
    os.nice(10)


def print_json(value: Any) -> None:
    """Print one JSON document on standard output."""
    import orjson

    with output_stream() as stream:
        document = orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        stream.write(escaped_json(document.decode()).encode())


def escaped_json(document: str) -> str:
    """The same JSON with the characters escaped that steer a terminal, or turn the direction of its text."""
    # In a document all of them are inside strings, except line breaks.
    return _STEERING.sub(_as_escape, document)


def _as_escape(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


@contextmanager
def output_stream() -> Iterator[BinaryIO]:
    """Standard output for bytes: a write is whole, or an error.

    With ``PYTHONUNBUFFERED``, as containers have it, a write to ``sys.stdout.buffer`` may be neither.
    """
    sys.stdout.flush()
    with open(sys.stdout.fileno(), "wb", closefd=False) as stream:
        try:
            yield stream
        except BaseException:
            give_up(stream)
            raise


def give_up(stream: IO[Any]) -> None:
    """Let what a stream still holds go nowhere: its reader has left, or may never read."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def run(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run the command's coroutine."""
    import asyncio

    results: list[_Result] = []

    async def keep() -> None:
        # Not as the result of the task: when asyncio puts the handler of Ctrl-C back, Python writes
        # the task out with its result, for an error that nobody sees, and a result may be large.
        results.append(await work)

    asyncio.run(keep())
    return results[0]
