"""Who this process is: the row in ``writers`` that its calls are attributed to."""

from __future__ import annotations

import os
import socket
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from sqlalchemy import bindparam, update
from sqlalchemy.dialects.sqlite import insert

from token_id_capture.store.driver import Connection
from token_id_capture.store.schema import writers
from token_id_capture.store.write.statements import Statement

LAST_SEEN_SECONDS: Final = 10.0

_REGISTER = Statement(insert(writers).on_conflict_do_nothing())
SEEN = Statement(
    update(writers).where(writers.c.writer_id == bindparam("this_writer")).values(last_seen_at=bindparam("seen_at"))
)


@dataclass(slots=True)
class ProcessIdentity:
    """A process on a machine since its latest boot: a pid alone is used again."""

    writer_id: str
    pid: int
    host: str
    boot_id: str
    started_at: float
    _seen_at: float = field(default=0.0, repr=False)

    @classmethod
    def of_this_process(cls) -> Self:
        """A new identity; each opened store of a process has its own."""
        return cls(uuid.uuid4().hex, os.getpid(), socket.gethostname(), boot_id(), time.time())

    def register(self, connection: Connection, now: float, *, known: bool) -> bool:
        """Insert or refresh the row inside the current transaction; True, for the next call."""
        if not known:
            values = {
                "writer_id": self.writer_id,
                "pid": self.pid,
                "host": self.host,
                "boot_id": self.boot_id,
                "started_at": self.started_at,
                "last_seen_at": now,
            }
            _REGISTER.run(connection, values)
        # The time that goes into the row may jump; how long ago that was must not.
        passed = time.monotonic()
        if not known or passed - self._seen_at > LAST_SEEN_SECONDS:
            see(connection, self.writer_id, now)
            self._seen_at = passed
        return True


def see(connection: Connection, writer_id: str, now: float) -> None:
    """Note in the writer's row that it was seen now, inside the current transaction."""
    SEEN.run(connection, {"this_writer": writer_id, "seen_at": now})


def boot_id() -> str:
    """The machine's latest boot, the namespace that counts this process's pid, and the clock tick of that boot in
    which the process started, with ``/`` between them.

    Containers of one pod have the same host name and kernel, and each its own process 7; a pid is used again; and a
    wall clock may be set at any time. Empty where the system tells none of it.
    """
    boot = _boot()
    return f"{boot}/{_pid_namespace()}/{start_tick(os.getpid()) or ''}" if boot else ""


def start_tick(pid: int) -> str | None:
    """When a process started, in clock ticks since the boot; None if it does not run, or no system tells.

    Raises:
        OSError: there is no ``/proc``, or no such process.
    """
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return ""
