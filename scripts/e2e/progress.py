"""What a person sees while it runs, and how long each phase took."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Phases:
    """Writes one line a phase to standard error; on a terminal a spinner or bar moves meanwhile."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._console = Console(stderr=True, highlight=False)
        self._bar: Progress | None = None

    @contextmanager
    def phase(self, name: str, doing: str, total: int | None = None) -> Iterator[None]:
        """Show ``doing`` while the block runs, then its time, which is kept under ``name``."""
        begun = time.monotonic()
        counted = () if total is None else (BarColumn(), MofNCompleteColumn())
        columns = (SpinnerColumn(), TextColumn("{task.description}"), *counted, TimeElapsedColumn())
        if not self._console.is_terminal:
            self.say(f"{doing} ...")
        with Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal) as bar:
            self._bar = bar
            bar.add_task(doing, total=total)
            try:
                yield
            finally:
                self._bar = None
                self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - begun, 1)
        self.say(f"{doing}: {time.monotonic() - begun:.1f} s")

    def advance(self) -> None:
        """One more of the phase's total is done."""
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0])

    def say(self, message: str) -> None:
        """One line."""
        if self._console.is_terminal:
            self._console.print(message, markup=False, soft_wrap=True)
        else:
            print(message, file=sys.stderr, flush=True)
