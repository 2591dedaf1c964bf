"""The command as tests run it; the fixtures ``tokcap`` and ``run_installed`` are in ``conftest``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

TOKCAP = Path(sys.executable).with_name("tokcap")
LONGEST_RUN_SECONDS = 60

RunInstalled = Callable[..., subprocess.CompletedProcess[bytes]]


class RunTokcap(Protocol):
    """Runs the command with these arguments, input and additional environment."""

    def __call__(
        self, *arguments: object, stdin: str | bytes = "", env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]: ...


def clean_environment() -> dict[str, str]:
    """The environment without what would change the output of the command."""
    dropped = ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TOKCAP_DATABASE", "TOKCAP_DEBUG")
    return {name: value for name, value in os.environ.items() if name not in dropped}
