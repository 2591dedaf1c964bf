"""The command ``tokcap``. Command modules import what is heavy inside their functions, so that
``tokcap --help`` stays quick."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated, NoReturn

import typer

from token_id_capture.cli import demo
from token_id_capture.cli.commands import (
    backup,
    browse,
    check,
    doctor,
    explain,
    export,
    finalize,
    gym,
    ls,
    prune,
    report,
    serve,
    show,
    sql,
    vacuum,
    verify,
)
from token_id_capture.cli.options import EXIT_INTERRUPTED, EXIT_UNUSABLE, give_up, show_warnings
from token_id_capture.cli.serving.options import ServeCommand
from token_id_capture.errors import TokenCaptureError

DEBUG_VARIABLE = "TOKCAP_DEBUG"
EXIT_UNEXPECTED = 70  # EX_SOFTWARE of sysexits.h

app = typer.Typer(
    name="tokcap",
    help="Capture, inspect and rebuild the exact tokens of agent rollouts.",
    epilog=f"{DEBUG_VARIABLE}=1 shows the traceback of an error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.command("backup")(backup.backup)
app.command("browse")(browse.browse)
app.command("check")(check.check)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("explain")(explain.explain)
app.command("export")(export.export)
app.command("finalize")(finalize.finalize)
app.command("gym")(gym.gym)
app.command("ls")(ls.ls)
app.command("prune")(prune.prune)
app.command("report")(report.report)
app.command("serve", cls=ServeCommand)(serve.serve)
app.command("show")(show.show)
app.command("sql")(sql.sql)
app.command("vacuum")(vacuum.vacuum)
app.command("verify")(verify.verify)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"tokcap {version('token-id-capture')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run ``tokcap``; whatever goes wrong ends in one line, a closed pipe in none."""
    show_warnings(lambda message: print(f"tokcap: warning: {message}", file=sys.stderr))
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
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exc()
    elif known:
        print(f"tokcap: {error}", file=sys.stderr)
    else:
        cause = f"{type(error).__name__}: {error}".replace("\n", " ")
        print(f"tokcap: unexpected {cause} ({DEBUG_VARIABLE}=1 shows the traceback)", file=sys.stderr)
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
