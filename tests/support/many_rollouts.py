"""Databases with many rollouts for tests at scale, made by the program behind ``scripts/make_database``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def database_with(rollouts: int, factory: pytest.TempPathFactory) -> Path:
    """That many rollouts of every fate, and ``zz-long``, which has a hundred calls. Made once a test run."""
    path = factory.getbasetemp() / f"{rollouts}-rollouts.db"
    if not path.exists():
        command = [sys.executable, "-m", "scale.many_rollouts", str(path), "--rollouts", str(rollouts)]
        environment = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120)
    return path
