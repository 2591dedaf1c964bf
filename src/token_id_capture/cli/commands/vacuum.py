"""``tokcap vacuum``: give free pages back to the file system."""

from __future__ import annotations

from typing import Annotated

import typer

from token_id_capture.cli.options import DatabaseFileOption, report
from token_id_capture.cli.output.database import database_file
from token_id_capture.cli.output.progress import progress_bar
from token_id_capture.cli.output.units import show_bytes


def vacuum(
    database: DatabaseFileOption,
    full: Annotated[
        bool, typer.Option("--full", help="Rewrite the whole file; all writers wait until it is done.")
    ] = False,
) -> None:
    """Give free pages back to the file system.

    Later captures would reuse these pages, so run it only if the file will not grow to its old size again. It works in
    short steps, and others write in between. --full rewrites the whole file at once. The result is smaller and in
    order, but writers wait and it needs disk space for the content twice.
    """
    from token_id_capture.store.maintain import vacuum as space

    path = database_file(
        database, "PostgreSQL frees space by itself (autovacuum), and VACUUM (FULL) in psql gives it back to the disk"
    )
    if full:
        report("warning: writers wait until the whole file is rewritten")
    with progress_bar() as show:
        done = space.rebuild(path, show) if full else space.vacuum(path, show)
    gone = done.size_before - done.size_after
    report(
        f"gave back {show_bytes(max(0, gone))}: the file had {show_bytes(done.size_before)} "
        f"and has {show_bytes(done.size_after)}"
    )
    if done.waiting:
        report(
            f"{show_bytes(done.waiting)} more will be given back at a checkpoint once a reader ends its open "
            f"transaction"
        )
    if not done.incremental:
        report("this file was made without incremental vacuum: tokcap vacuum --full gives free pages back")
