"""A progress bar on standard error, if a person looks at it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from token_id_capture.cli.options import error_console

Show: TypeAlias = Callable[[str, int, int | None], None]
"""``show(what, done, total)``; a total of None means that nobody knows."""


@contextmanager
def progress_bar() -> Iterator[Show]:
    """A function that shows how far the work is; it does nothing without a terminal."""
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    # Results go through the bar's console only where both are on the terminal; a file gets them itself.
    shared = sys.stdout.isatty()
    with Progress(*columns, console=error_console(), transient=True, redirect_stdout=shared) as progress:
        shown: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int | None) -> None:
            if what not in shown:
                for task in shown.values():
                    progress.update(task, visible=False)
                shown[what] = progress.add_task(what, total=total)
            progress.update(shown[what], completed=done, total=total)

        yield show
