"""Clocks and counters of the process that is measured."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

MEGABYTE = 2**20
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_HEARTBEAT_SECONDS = 0.002


class Heartbeat:
    """How long the event loop was blocked at most: by how much a short timer came late."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._loop = asyncio.get_running_loop()
        self._beat(self._loop.time())

    def _beat(self, due: float) -> None:
        now = self._loop.time()
        self.longest = max(self.longest, now - due)
        due = now + _HEARTBEAT_SECONDS
        self._handle = self._loop.call_at(due, self._beat, due)

    def stop(self) -> None:
        """Stop the timer."""
        self._handle.cancel()


class PeakMemory:
    """How far the resident memory rises above what it is now, in bytes."""

    def __init__(self) -> None:
        if sys.platform == "linux":
            # Sets the high-water mark back to the present size.
            _CLEAR_REFS.write_text("5")
        self._before = _resident()

    def rise(self) -> int:
        """The highest size since the beginning, less the size at the beginning."""
        return max(0, _highest() - self._before)


def _resident() -> int:
    return _status("VmRSS") if sys.platform == "linux" else _highest()


def _highest() -> int:
    if sys.platform == "linux":
        return _status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _status(field: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in {_STATUS}")


class Stopwatch:
    """Wall time and processor time of all threads, in seconds, since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def wall(self) -> float:
        """Wall time so far."""
        return time.perf_counter() - self._wall

    def cpu(self) -> float:
        """Processor time of this process so far."""
        return time.process_time() - self._cpu


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that ``percent`` of ``values`` do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def size_on_disk(directory: Path) -> int:
    """Bytes of all files below ``directory``."""
    return sum(entry.stat().st_size for entry in directory.rglob("*") if entry.is_file())


def fsync_seconds(directory: Path, repeats: int = 20) -> float:
    """The median time of an fsync after an append of 4 KiB: what this disk costs."""
    path = directory / "fsync"
    times = []
    with path.open("wb", buffering=0) as file:
        for _ in range(repeats):
            file.write(bytes(4096))
            start = time.perf_counter()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - start)
    path.unlink()
    return percentile(times, 50)
