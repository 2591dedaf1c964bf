"""``tokcap backup``: a consistent copy, while others write."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from token_id_capture.cli.options import EXIT_PARTIAL, DatabaseFileOption, print_line, report
from token_id_capture.cli.output.database import database_file
from token_id_capture.cli.output.progress import progress_bar
from token_id_capture.cli.output.totals_text import checked_in_words
from token_id_capture.cli.output.units import plural, show_bytes


def backup(
    destination: Annotated[
        Path, typer.Argument(metavar="DEST", help="The new file; an existing file is never replaced.")
    ],
    database: DatabaseFileOption,
    flag_open: Annotated[
        bool,
        typer.Option(help="Flag the rollouts that are open in the copy, because it lacks their later calls."),
    ] = True,
) -> None:
    """Copy a database to a new file while other processes write it.

    The copy is one consistent state, without free pages. It appears under its name only when it is whole and on
    disk. Only its owner can read it, and it is checked as tokcap verify does. To restore it, stop the writers and
    replace the old file and its -wal with it. Rollouts that are open in the copy are flagged incomplete there, because
    a restored copy lacks their later calls. For a last copy, once no process writes, use --no-flag-open. A restored
    copy delivers again what was delivered after it was made. Exit code 1: the copy was made, but calls in it and in
    the original are damaged; 2: there is no copy.
    """
    from token_id_capture.store.maintain.backup import back_up
    from token_id_capture.store.maintain.verification import Checked

    path = database_file(
        database, "back up a server with pg_dump or pg_basebackup, or copy rollouts to a file with tokcap copy"
    )
    checked = Checked()
    with progress_bar() as show:
        damages = back_up(path, Path(os.path.abspath(destination)), checked, show, flag_open=flag_open)
    for damage in damages:
        print_line(str(damage))
    outcome = f"{plural(len(damages), 'damage')}; run tokcap verify on the original too" if damages else "sound"
    report(f"copied {show_bytes(destination.stat().st_size)} to {destination}; {checked_in_words(checked)}: {outcome}")
    if damages:
        raise typer.Exit(EXIT_PARTIAL)
