"""The directory with what takes minutes to install: each part is made once, and reused while its recipe stands."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

_LINES_SHOWN = 15


class CannotRunError(Exception):
    """The proof could not be made; the message says what to do."""


def default_cache() -> Path:
    """Where a person's caches are."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "token-id-capture-e2e"


class Cache:
    """Parts in folders of ``root``. Commands run at the lowest priority, their output goes to ``root/logs``."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.logs = self.root / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)

    def is_made(self, part: str, recipe: str) -> bool:
        """Whether the part was made to the end, by this recipe."""
        mark = self._mark(part)
        return mark.exists() and mark.read_text("utf-8") == recipe

    def make(self, part: str, recipe: str, make: Callable[[Path], None]) -> Path:
        """The folder of a part; what a run left half-made, or an older recipe made, is made anew."""
        folder = self.root / part
        if not self.is_made(part, recipe):
            self._mark(part).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            self._mark(part).write_text(recipe, "utf-8")
        return folder

    def _mark(self, part: str) -> Path:
        return self.root / f"{part}.made"

    def run(self, name: str, command: Sequence[str | Path]) -> None:
        """Run a command to its end.

        Raises:
            CannotRunError: it is not there, or failed; with the end of its output.
        """
        self.read(name, command, log_output=True)

    def read(self, name: str, command: Sequence[str | Path], *, log_output: bool = False) -> bytes:
        """What a command writes to standard output, unless that is for the log too.

        Raises:
            CannotRunError: as ``run``.
        """
        log = self.logs / f"{name}.log"
        with log.open("wb") as errors:
            output = errors if log_output else subprocess.PIPE
            try:
                done = subprocess.run(gently(command), stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
            except OSError as error:
                raise CannotRunError(f"{command[0]}: {error.strerror}") from error
        if done.returncode:
            raise CannotRunError(f"{name} failed (exit code {done.returncode}); the end of {log}:\n{end_of(log)}")
        return done.stdout or b""

    def new_environment(self, folder: Path) -> Path:
        """A virtual environment in ``folder``; returns its Python."""
        self.run("venv", [sys.executable, "-m", "venv", "--clear", folder])
        return folder / "bin" / "python"


def gently(command: Sequence[str | Path]) -> list[str]:
    """The command at the lowest priority."""
    return ["nice", "-n", "19", *map(str, command)]


def end_of(log: Path) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text("utf-8", errors="replace").splitlines()[-_LINES_SHOWN:])
