"""A thread that writes, and how work reaches it: the half of a writer that is the same for every database."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from token_id_capture.errors import StoreClosedError
from token_id_capture.store.file.location import FREE_SPACE_FLOOR
from token_id_capture.store.write.process import ProcessIdentity
from token_id_capture.store.write.queue import Job, JobQueue, Operation, Turns, resolve

QUEUE_BYTES: Final = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a writer may hold and fill, in bytes; see ``TokenCaptureStore``."""

    free_space_floor: int = FREE_SPACE_FLOOR
    max_bytes: int | None = None
    queue_bytes: int = QUEUE_BYTES


class WriterThread(ABC):
    """Takes jobs from event loops, and does them in groups in a thread of its own."""

    def __init__(self, name: str, limits: Limits, predecessor: WriterThread | None) -> None:
        """``predecessor`` is a writer that failed; it has ended before this one opens anything."""
        self._limits = limits
        self._predecessor = predecessor
        self._queue = JobQueue(limits.queue_bytes)
        self._turns = Turns()
        self._identity = ProcessIdentity.of_this_process()
        # Daemonic: a process that forgets to close still ends, and what was acknowledged is on disk.
        self._thread = threading.Thread(target=self._run, name=f"tokcap-writer {name}", daemon=True)
        self._ended = threading.Event()
        self.failure: BaseException | None = None

    @property
    def writer_id(self) -> str:
        """The id of this process's row in ``writers``."""
        return self._identity.writer_id

    @property
    def alive(self) -> bool:
        """Whether jobs are still taken."""
        return not self._ended.is_set() and not self._queue.closing

    @property
    def waiting(self) -> tuple[int, int]:
        """How many jobs wait, and their bytes."""
        return self._queue.waiting

    def start(self) -> None:
        """Start the thread; it opens the database itself, and fails the waiting jobs if it can't."""
        self._thread.start()

    async def submit(self, operation: Operation, payload: Any, size: int = 1024) -> Any:
        """Do this in the next group and return its result once that is durable.

        A caller that is cancelled gives up waiting; the job is still done, unless it waited for room.

        Raises:
            StoreClosedError: the writer ended.
            StoreError, or what the operation raises.
        """
        loop = asyncio.get_running_loop()
        if self._queue.closing:
            raise self._closed()
        job = Job(operation, payload, size, loop, loop.create_future())
        # What is asked for in one turn of the loop is one group. A thread that began with the
        # first of it would fight with the loop for the interpreter, and commit more often.
        self._turns.add(job, self._end_turn)
        return await job.future

    def _end_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._hand_over(self._turns.end(loop))

    def _hand_over(self, jobs: list[Job]) -> None:
        if not jobs:
            return  # no reason to wake the thread
        try:
            self._queue.offer(jobs)
        except StoreClosedError:
            for job in jobs:
                job.error = self._closed()
            resolve(jobs)

    def _closed(self) -> BaseException:
        # A writer that ended by itself, say because the database cannot be opened, says why.
        return self.failure or StoreClosedError("the store is closed: open a new one")

    def end(self) -> None:
        """Take no more jobs; the thread finishes what waits and ends."""
        self._hand_over(self._turns.end_all())
        self._queue.close()

    async def close(self) -> None:
        """Finish what waits, then end. Idempotent."""
        self.end()
        if self._thread.ident is not None:
            # Where the interpreter ends, no thread starts any more, and nobody else waits for this loop. Not the loop's
            # own executor: asyncio.run would start a thread to shut that down, and fail.
            joining = ThreadPoolExecutor(1)
            with contextlib.suppress(RuntimeError):
                await asyncio.get_running_loop().run_in_executor(joining, self._thread.join)
            joining.shutdown(wait=False)
            self._thread.join()

    @abstractmethod
    def _run(self) -> None:
        """What the thread does."""

    def _follow_predecessor(self) -> None:
        if self._predecessor is not None:
            self._predecessor._thread.join()
            self._predecessor = None

    def _stop_taking(self) -> None:
        """At the thread's end: what waits is refused."""
        self._queue.close()
        self._ended.set()
        while group := self._queue.take():
            for job in group:
                job.error = self._closed()
            resolve(group)


def fail(group: list[Job], error: BaseException) -> None:
    """Give each job of a group this error."""
    for job in group:
        job.result, job.error = None, error
