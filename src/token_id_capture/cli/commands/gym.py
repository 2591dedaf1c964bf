"""``tokcap gym``: a command of NeMo Gym with its token capture in a database of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from token_id_capture.cli.options import DatabaseOption, fail


def gym(
    database: DatabaseOption,
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- COMMAND...", help="A command of NeMo Gym or a Python file, and its arguments."),
    ],
    configure: Annotated[
        bool,
        typer.Option(
            "--configure/--no-configure",
            help="Append the settings that make Gym's servers write to the database to the command.",
        ),
    ] = True,
) -> None:
    """Run NeMo Gym with this store in place of its file store.

    The command runs in this process. The collector freezes, rebuilds and retires through the database. Before a
    run, it deletes the ids that it is about to use. Servers started elsewhere need the same
    settings in their configuration.
    """
    from token_id_capture.integrations.nemo_gym import launch

    path = Path(database).absolute()
    if path.is_dir():
        fail(f"{database} is a directory: name the database file")
    launch.install(path)
    launch.run([*command, *(launch.overrides(path) if configure else ())])
