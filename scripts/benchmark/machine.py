"""What the numbers depend on: the machine, and its disk."""

from __future__ import annotations

import os
import platform
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

from benchmark.measure import fsync_seconds


def describe_machine(directory: Path) -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "fsync_ms": round(fsync_seconds(directory) * 1e3, 2),
    }


def disk() -> str:
    """Where to measure unless told: the usual temporary directory is in memory on many systems, where fsync is free."""
    return "/var/tmp" if Path("/var/tmp").is_dir() else tempfile.gettempdir()
