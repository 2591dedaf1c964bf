"""Write requests (jobs) for the writer thread, and the bounded queue in which they wait.

::

    offer ──► outside ──(held + size <= capacity)──► jobs ──(256 rows or 16 MB)──► take ──► one transaction
              unbounded, of callers that wait         bounded in bytes

The bound is in bytes, as a call holds from some hundred bytes to many megabytes. ``offer`` never blocks: it runs
on event loops. What does not fit waits outside, in its order; a caller that is cancelled there asked for nothing,
while what is inside is written whether its caller still waits or not. With a capacity of 100 bytes, jobs of 60,
50 and 10 bytes: the first is inside, the others wait, although the third would fit, as it must not overtake.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from token_id_capture.errors import StoreClosedError, TokenCaptureError
from token_id_capture.store.driver import Connection

GROUP_ROWS: Final = 256
GROUP_BYTES: Final = 16 * 2**20


@dataclass(slots=True)
class Batch:
    """What an operation needs of the group that it is part of.

    ``shortage`` says that the disk is nearly full, and is empty while it is not.
    """

    connection: Connection
    writer_id: str
    now: float
    shortage: str


@dataclass(slots=True, eq=False)
class Job:
    """One thing to do, and who waits for it."""

    operation: Operation
    payload: Any
    size: int
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    result: Any = None
    error: BaseException | None = None


Operation = Callable[[Batch, list[Job]], None]


def one_by_one(work: Callable[[Batch, Any], Any]) -> Operation:
    """An operation that handles each job by itself: ``work(batch, payload)`` gives its result.

    An error of this package is the job's answer, and what ``work`` wrote before it is committed.
    """

    def operation(batch: Batch, jobs: list[Job]) -> None:
        for job in jobs:
            try:
                job.result = work(batch, job.payload)
            except TokenCaptureError as error:
                job.error = error

    return operation


def open_only(batch: Batch, jobs: list[Job]) -> None:
    """The operation that only waits until the database is open."""


class Turns:
    """What each event loop has asked for in its present turn. Each loop adds to its own; any thread may take."""

    def __init__(self) -> None:
        # Taken again where the garbage collector ends the writer in the middle of it.
        self._lock = threading.RLock()
        self._jobs: dict[asyncio.AbstractEventLoop, list[Job]] = {}

    def add(self, job: Job, at_end: Callable[[asyncio.AbstractEventLoop], None]) -> None:
        """Add a job to the turn of its loop; if it begins with it, ``at_end`` is called when it ends."""
        with self._lock:
            if job.loop not in self._jobs:
                # Scheduled first: an interrupt in between must leave no turn that never ends.
                job.loop.call_soon(at_end, job.loop)
                self._jobs[job.loop] = []
            self._jobs[job.loop].append(job)

    def end(self, loop: asyncio.AbstractEventLoop) -> list[Job]:
        """End the turn of a loop, and those of loops that were closed in theirs; take their jobs."""
        with self._lock:
            ended = [other for other in self._jobs if other is loop or other.is_closed()]
            return [job for other in ended for job in self._jobs.pop(other)]

    def end_all(self) -> list[Job]:
        """End every turn, and take the jobs."""
        with self._lock:
            ended, self._jobs = self._jobs, {}
            return [job for jobs in ended.values() for job in jobs]


@dataclass(slots=True)
class JobQueue:
    """Jobs in the order in which they were asked for; those beyond ``capacity`` bytes wait outside."""

    capacity: int
    jobs: deque[Job] = field(default_factory=deque)
    outside: deque[Job] = field(default_factory=deque)
    held: int = 0
    closing: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def waiting(self) -> tuple[int, int]:
        """How many jobs there are, inside and outside, and their bytes."""
        with self.changed:
            outside = sum(job.size for job in self.outside)
            return len(self.jobs) + len(self.outside), self.held + outside

    def offer(self, jobs: Iterable[Job]) -> None:
        """Append jobs.

        Raises:
            StoreClosedError: no more jobs are taken.
        """
        with self.changed:
            if self.closing:
                raise StoreClosedError("the store is closed: open a new one")
            self.outside.extend(jobs)
            self._let_in(waited=False)
            self.changed.notify()

    def _let_in(self, *, waited: bool) -> None:
        # One too large for the bound comes in alone.
        while self.outside and (not self.jobs or self.held + self.outside[0].size <= self.capacity):
            job = self.outside.popleft()
            # A caller that gave up before there was room asked for nothing.
            if not (waited and job.future.cancelled()):
                self.jobs.append(job)
                self.held += job.size

    def wait(self, timeout: float | None) -> bool:
        """Wait for a job (True), for the end (False), or for the timeout (True, and no job)."""
        with self.changed:
            if not self.jobs and not self.closing:
                self.changed.wait(timeout)
            return bool(self.jobs) or not self.closing

    def take(self) -> list[Job]:
        """Remove the next group."""
        group: list[Job] = []
        size = 0
        with self.changed:
            while self.jobs and len(group) < GROUP_ROWS and (not group or size + self.jobs[0].size <= GROUP_BYTES):
                job = self.jobs.popleft()
                group.append(job)
                size += job.size
            self.held -= size
            self._let_in(waited=True)
        return group

    def close(self) -> None:
        """Take no more jobs; what was offered is still there to be taken."""
        with self.changed:
            self.closing = True
            self.changed.notify()


def resolve(jobs: list[Job]) -> None:
    """Tell the callers of these jobs, with one wake-up an event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Job]] = {}
    for job in jobs:
        by_loop.setdefault(job.loop, []).append(job)
    for loop, of_loop in by_loop.items():
        _call(loop, _finish, of_loop)


def _call(loop: asyncio.AbstractEventLoop, callback: Callable[[Any], None], argument: Any) -> None:
    # A loop that was closed meanwhile has nobody left to tell.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, argument)


def _finish(jobs: Iterable[Job]) -> None:
    for job in jobs:
        if job.future.done():
            # Its caller was cancelled and no longer waits; the job is still done.
            continue
        if job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(job.result)
