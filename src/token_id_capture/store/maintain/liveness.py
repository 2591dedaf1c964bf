"""Whether a process that wrote to the database still runs."""

from __future__ import annotations

import os
import socket
from enum import StrEnum
from pathlib import Path
from typing import Final

from token_id_capture.store.write.process import boot_id, start_tick

# Rows of earlier releases tell no tick, and the clock has to do: how much later than its own row in
# ``writers`` a process may seem to have started, as clocks are set now and then.
_CLOCK_SLACK_SECONDS: Final = 60.0


class Liveness(StrEnum):
    """What can be said about a process from here."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"
    """It ran on another host or in another container, whose processes cannot be seen from here."""


def liveness_of(pid: int, host: str, booted: str, started_at: float) -> Liveness:
    """Look for the process of a row of ``writers``; ``booted`` is the row's ``boot_id``."""
    if host != socket.gethostname():
        return Liveness.UNKNOWN
    boot, namespace, tick = [*booted.split("/"), "", ""][:3]
    boot_here, namespace_here = [*boot_id().split("/"), ""][:2]
    if boot != boot_here:
        return Liveness.DEAD
    if namespace and namespace != namespace_here:
        # Containers of one pod share host name and kernel, but count their processes separately.
        return Liveness.UNKNOWN
    return Liveness.ALIVE if _runs(pid, tick, started_at) else Liveness.DEAD


def _runs(pid: int, tick: str, started_at: float) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        pass
    except (ProcessLookupError, OverflowError):
        return False
    try:
        running = start_tick(pid)
        if running is None or tick:
            return running is not None and running == tick
        since_boot = int(running) / os.sysconf("SC_CLK_TCK")
        return _booted_at() + since_boot <= started_at + _CLOCK_SLACK_SECONDS
    except (OSError, ValueError, IndexError):
        # No /proc, as on macOS: the pid has to do.
        return True


def _booted_at() -> float:
    for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    raise ValueError("/proc/stat tells no boot time")
