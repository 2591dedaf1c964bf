"""Forks the processes of a round, kills them at random instants, and forks others in their place.

The parent has imported everything and opened no store, so a restart costs milliseconds. (A process
that has a database open must not fork: SQLite's locks do not pass to a child.)
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from mmap import mmap
from pathlib import Path

from token_id_capture.store import TokenCaptureStore
from torturing.plan import Plan, Round
from torturing.reader import run_reader
from torturing.work import run_writer

Body = Callable[[Round, str, mmap, int], None]

_TICK_SECONDS = 0.2
# Of the kills, those that may hit a process before it has done anything.
_EARLY_KILLS = 0.2
# Of the kills, those that hit the database's server, if there is one.
_STRIKES = 0.1


@dataclass(slots=True)
class Process:
    """A place among the processes, and who holds it now."""

    body: Body
    place: int
    pid: int = 0
    generation: int = 0
    steps_at_start: int = 0
    starved: bool = False


@dataclass(slots=True)
class Supervisor:
    """Runs one round after the other."""

    plan: Plan
    dice: random.Random
    counters: mmap
    kills: int = 0
    accidents: list[str] = field(default_factory=list)
    strike: Callable[[], str] | None = None
    """Hits the server of the database, and says how; an empty answer if it is not back yet from the last time."""
    strikes: Counter[str] = field(default_factory=Counter)
    stopped: bool = False

    @classmethod
    def of(cls, plan: Plan, strike: Callable[[], str] | None = None) -> Supervisor:
        return cls(plan, random.Random(plan.seed), mmap(-1, 8 * (plan.writers + 1)), strike=strike)

    @property
    def steps(self) -> int:
        """What all processes have done so far."""
        return sum(memoryview(self.counters).cast("q"))

    def run(self, part: Round, seconds: float, tick: Callable[[], None]) -> None:
        """Torture for some seconds, then kill whoever is left."""
        gc.freeze()
        self._create_database()
        processes = [Process(run_writer, place) for place in range(self.plan.writers)]
        processes.append(Process(run_reader, self.plan.writers))
        end = time.monotonic() + seconds
        next_kill = time.monotonic() + self._pause()
        next_tick = 0.0
        try:
            for process in processes:
                self._start(part, process)
            while time.monotonic() < end and not self.stopped and not self.accidents:
                time.sleep(max(0.0, min(next_kill, next_tick, end) - time.monotonic()))
                if time.monotonic() >= next_kill:
                    self._kill_somebody(part, processes)
                    next_kill = time.monotonic() + self._pause()
                if time.monotonic() >= next_tick:
                    tick()
                    next_tick = time.monotonic() + _TICK_SECONDS
        finally:
            for process in processes:
                self._kill(process)

    def _kill_somebody(self, part: Round, processes: list[Process]) -> None:
        if self.strike is not None and self.dice.random() < _STRIKES and (struck := self.strike()):
            self.strikes[struck] += 1
            self.kills += 1
        elif victims := self._victims(processes):
            victim = self.dice.choice(victims)
            self._kill(victim)
            self._start(part, victim)

    def _create_database(self) -> None:
        # By a process that ends, as this one must not open it. Kills during the creation, which takes
        # longer than a process lives here, are a test of their own.
        if not run_in_child(lambda: asyncio.run(_open(self.plan.target))):
            self.accidents.append("the database could not be created; the output says why")

    def _victims(self, processes: list[Process]) -> list[Process]:
        """Who may be killed now: on a busy machine, too, most processes must get beyond their start."""
        early = self.dice.random() < _EARLY_KILLS
        return [process for process in processes if self._has_worked(process) or (early and not process.starved)]

    def _has_worked(self, process: Process) -> bool:
        return self._steps_of(process) > process.steps_at_start

    def _steps_of(self, process: Process) -> int:
        return memoryview(self.counters).cast("q")[process.place]

    def _pause(self) -> float:
        return self.dice.expovariate(self.plan.kills_per_second)

    def _start(self, part: Round, process: Process) -> None:
        process.generation += 1
        process.steps_at_start = self._steps_of(process)
        name = f"{part.number}.{process.place}.{process.generation}"
        process.pid = fork(lambda: process.body(part, name, self.counters, process.place))

    def _kill(self, process: Process) -> None:
        if not process.pid:
            return
        process.starved = not self._has_worked(process)
        os.kill(process.pid, signal.SIGKILL)
        _, status = os.waitpid(process.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGKILL:
            self.kills += 1
        else:
            self.accidents.append(f"process {process.place} had ended by itself ({code}); its output says why")
        process.pid = 0


async def _open(database: str | Path) -> None:
    async with TokenCaptureStore(database):
        pass


def run_in_child(body: Callable[[], None]) -> bool:
    """Run this in a process of its own; whether it ended well."""
    _, status = os.waitpid(fork(body), 0)
    return status == 0


def fork(body: Callable[[], None]) -> int:
    """Run this in a process of its own, and do not wait; its id."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        code = 1
        try:
            body()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid
