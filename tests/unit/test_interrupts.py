"""A suite that was started in the background can interrupt its children all the same."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
PROGRAM = """
import subprocess, sys
from support.interrupts import listen_to_interrupts
listen_to_interrupts()
child = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
subprocess.run([sys.executable, "-c", child], check=True)
"""


def test_children_of_a_suite_in_the_background_listen_to_sigint() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={"PYTHONPATH": str(TESTS)},
            capture_output=True,
            text=True,
            check=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert run.stdout == "True\n"
