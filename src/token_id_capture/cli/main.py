"""The command ``tokcap``: a table of its commands, each of which is imported when it is asked for.

So ``tokcap --help`` loads none of them, and a command only what it needs itself.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Iterator, MutableMapping
from importlib import import_module
from typing import Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from token_id_capture.cli.options import EXIT_INTERRUPTED, EXIT_UNUSABLE, give_up, report, show_warnings
from token_id_capture.errors import TokenCaptureError

DEBUG_VARIABLE = "TOKCAP_DEBUG"
EXIT_UNEXPECTED = 70  # EX_SOFTWARE of sysexits.h

SUMMARIES: Final = {
    "backup": "Copy a database to a new file while other processes write it.",
    "browse": "Browse a database with Datasette, while others write it.",
    "check": "Ask an engine for a few tokens in each mode, and report what can be captured.",
    "copy": "Copy rollouts from one database to another, exactly.",
    "delete": "Delete rollouts whatever their state, before their ids are used again.",
    "demo": "Try everything on this machine, in seconds: agents, capture, a crash, training rows.",
    "doctor": "Explain what a crash or a long run left behind.",
    "explain": "Explain in sentences why a rollout is masked, and what to do about it.",
    "export": "Export the sequences of rollouts that are in the database.",
    "finalize": "Build the training rows of finished rollouts, and deliver their captures.",
    "gym": "Run NeMo Gym with this store in place of its file store.",
    "ls": "List the rollouts of a database by their ids.",
    "prune": "Delete old tombstones and, on request, old evidence.",
    "report": "Write a page about one rollout, or about all, for a browser.",
    "serve": "Run the gateway between agents and an engine, and capture the tokens of rollouts.",
    "show": "Show everything stored about a rollout except its tokens.",
    "sql": "Run one SQL statement that only reads, on a live database.",
    "vacuum": "Give free pages back to the file system.",
    "verify": "Check what is stored against its digests.",
    "view": "Follow rollouts in a browser, live, while others write them.",
}
"""Every command, with the first sentence of its help. It is a function of its name, in a module of its name."""

_ELSEWHERE: Final = {"demo": "token_id_capture.cli.demo"}
_OWN_PARSERS: Final = {"serve": ("token_id_capture.cli.serving.options", "ServeCommand")}


class _Command(TyperCommand):
    """A command whose arguments may begin with a dash where no option could: SQL that begins with a comment."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Options have no white space in their names, so what has is an argument; a blank keeps it from the parser."""
        named = (argument.partition("=")[0] for argument in args)
        marked = [
            f" {argument}" if argument.startswith("--") and (any(map(str.isspace, name))) else argument
            for argument, name in zip(args, named, strict=True)
        ]
        return super().parse_args(ctx, marked)


class Commands(MutableMapping[str, Any]):
    """The commands by name, each loaded on first use."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            if name not in SUMMARIES:
                raise KeyError(name)
            module = import_module(_ELSEWHERE.get(name, f"token_id_capture.cli.commands.{name}"))
            alone = typer.Typer(add_completion=False, rich_markup_mode=None)
            parser = _OWN_PARSERS.get(name)
            cls = _Command if parser is None else getattr(import_module(parser[0]), parser[1])
            alone.command(name, cls=cls)(getattr(module, name))
            self._loaded[name] = typer.main.get_command(alone)
        return self._loaded[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(SUMMARIES)

    def __len__(self) -> int:
        return len(SUMMARIES)


class _Group(TyperGroup):
    """Lists the commands from the table."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = Commands()

    def list_commands(self, ctx: Any) -> list[str]:
        return list(SUMMARIES)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(SUMMARIES.items()))


app = typer.Typer(
    name="tokcap",
    cls=_Group,
    help="Capture, inspect and rebuild the exact tokens of agent rollouts.",
    epilog=f"{DEBUG_VARIABLE}=1 shows the traceback of an error.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"tokcap {version('token-id-capture')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run ``tokcap``; whatever goes wrong ends in one line, a closed pipe in none."""
    show_warnings(lambda message: report(f"warning: {message}"))
    # Who starts the program may close its streams (>&-); nothing below has to ask for that.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  open as long as the process
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    try:
        app()
    except BrokenPipeError:
        sys.exit(1)
    except Exception as error:
        _leave(error)
    finally:
        _flush()


def _leave(error: Exception) -> NoReturn:
    known = isinstance(error, TokenCaptureError)
    if isinstance(error, OSError) and error.filename is None and error.errno in _FULL:
        # Files are written where such an error is named; what is left are the streams of this process.
        known, error = True, TokenCaptureError(f"the output cannot be written: {error.strerror}")
        give_up(sys.stdout)
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exc()
    elif known:
        report(str(error))
    else:
        cause = f"{type(error).__name__}: {error}".replace("\n", " ")
        report(f"unexpected {cause} ({DEBUG_VARIABLE}=1 shows the traceback)")
    sys.exit(EXIT_UNUSABLE if known else EXIT_UNEXPECTED)


def _flush() -> None:
    """Write what is buffered now: at the very end a pipe that was closed would complain, and one that
    nobody reads could not be given up."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            give_up(stream)
        except KeyboardInterrupt:
            give_up(stream)
            sys.exit(EXIT_INTERRUPTED)
