"""Whether a process that wrote to the database still runs."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, Self

from token_id_capture.store.driver import Connection
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


SILENT_SECONDS: Final = 60.0
"""A process that writes to a server says every 10 s that it lives; one that did not for so long is gone."""


@dataclass(frozen=True, slots=True)
class Clock:
    """The clock of a server, by which the processes of all hosts say when they were seen."""

    now: float

    @classmethod
    def of_server(cls, connection: Connection) -> Self:
        """Read it, in seconds since the epoch."""
        return cls(connection.execute("SELECT extract(epoch FROM clock_timestamp())::double precision").fetchone()[0])


def liveness(pid: int, host: str, booted: str, started_at: float, last_seen_at: float, clock: Clock | None) -> Liveness:
    """What is known of a process: by a look at it, and where it cannot be seen from here, by its latest word to a
    server. Without ``clock`` the database is a file, in which no process says anything while it has no work."""
    found = liveness_of(pid, host, booted, started_at)
    if found is not Liveness.UNKNOWN or clock is None:
        return found
    return Liveness.ALIVE if clock.now - last_seen_at <= SILENT_SECONDS else Liveness.DEAD


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
