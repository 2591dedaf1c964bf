"""The command ``tokcap``. Command modules import what is heavy inside their functions, so that
``tokcap --help`` stays quick."""

from __future__ import annotations

import os
import sys

import typer

from token_id_capture.errors import TokenCaptureError

app = typer.Typer(
    name="tokcap",
    help="Capture, inspect and rebuild the exact tokens of agent rollouts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run ``tokcap``; errors of this package end in one line, a closed pipe in none."""
    try:
        app()
    except TokenCaptureError as error:
        print(f"tokcap: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        # Standard output is gone; give the interpreter's last flush somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
