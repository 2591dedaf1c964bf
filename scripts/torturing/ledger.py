"""What was acknowledged, written down outside the database by those to whom it was acknowledged.

One file a process, one ``os.write`` a line on a descriptor opened with ``O_APPEND``. SIGKILL ends a
process and loses nothing that ``write`` has given to the kernel, so no ``fsync`` is needed; a line
that the kill itself cut short has no newline, and counts as never written. Times are nanoseconds of
``CLOCK_MONOTONIC``, which all processes of a machine share.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson


@dataclass(slots=True)
class Line:
    """One event: when it was asked for, when the answer was there, and what it was about."""

    kind: str
    started: int
    ended: int
    rollout_id: str
    call_id: str = ""
    snapshot_id: str = ""
    version: int = 0
    incomplete: bool = False
    done: bool = True
    calls: list[str] = field(default_factory=list)
    detail: str = ""


class Ledger:
    """The file of one process."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, kind: str, started: int, rollout_id: str = "", **details: Any) -> None:
        """Write an event that has just ended."""
        line = {"kind": kind, "started": started, "ended": time.monotonic_ns(), "rollout_id": rollout_id, **details}
        os.write(self._descriptor, orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def read_ledgers(directory: Path) -> Iterator[Line]:
    """All whole lines of all processes."""
    for path in sorted(directory.glob("*.ledger")):
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield Line(**orjson.loads(line))
