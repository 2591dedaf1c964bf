"""A disk whose fsync takes longer: a small library that the measured process loads first."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

_SOURCE = Path(__file__).with_name("fsync_delay.c")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_duration(text: str) -> float:
    """Seconds of a text such as ``5ms``.

    Raises:
        ValueError: it has another form.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a duration: write it like 5ms")
    return float(match[1]) * _UNITS[match[2]]


def build_library(directory: Path) -> Path:
    """Compile the library into ``directory``, once.

    Raises:
        SystemExit: this is no Linux, or there is no C compiler.
    """
    library = directory / "fsync_delay.so"
    if library.exists():
        return library
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if sys.platform != "linux" or compiler is None:
        raise SystemExit("bench: --fsync-delay needs Linux and a C compiler (cc)")
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return library


def delayed_environment(seconds: float, directory: Path) -> dict[str, str]:
    """The environment variables that give a process the delay; none for 0."""
    if not seconds:
        return {}
    return {"LD_PRELOAD": str(build_library(directory)), "FSYNC_DELAY_US": str(round(seconds * 1e6))}
