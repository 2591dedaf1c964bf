"""Runs the server: one worker in this process, or several under supervision.

Of uvicorn only its public ``Server`` and ``Config`` are used. Its own supervisor is private; gunicorn's is
public, and kills a worker whose event loop is late, asks the file system for heartbeats, and would be one
more dependency for what is needed here: start workers, ask them, replace them one by one, stop them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

import typer

from token_id_capture.cli.options import LogFormat
from token_id_capture.cli.serving.logs import log_to_stderr
from token_id_capture.cli.serving.worker import CANNOT_START, METRICS_VARIABLE, make_server, run_worker
from token_id_capture.store.maintain.leftovers import abandoned, held

_logger = logging.getLogger(__name__)

# A forked worker would share the parent's threads, locks and database connections.
_processes = get_context("spawn")

_METRICS_PREFIX: Final = "tokcap-metrics-"
_TICK_SECONDS: Final = 0.5
_ANSWER_SECONDS: Final = 30.0
"""How long a worker may take to answer, or to serve after its start, before it is taken for hung."""
_CLOSE_SECONDS: Final = 10.0
"""How long a worker may take to close its store after its last call, before it is killed."""


def run_server(listener: socket.socket, workers: int, shutdown_seconds: int, log_format: LogFormat) -> None:
    """Serve until a signal ends it. The settings of the workers stand in the environment.

    Raises:
        typer.Exit: a worker could not start.
    """
    # Of a program that started this one; the workers' numbers are not its own.
    os.environ.pop(METRICS_VARIABLE, None)
    os.environ.pop(METRICS_VARIABLE.lower(), None)
    # When a counter was made is of no use, and is not told where there are several workers.
    os.environ["PROMETHEUS_DISABLE_CREATED_SERIES"] = "true"
    if workers > 1:
        log_to_stderr(log_format)
        with _shared_metrics() as metrics:
            started = Supervisor(listener, workers, shutdown_seconds, metrics).run()
        if not started:
            raise typer.Exit(1)
        return
    # After its shutdown uvicorn raises the signal again; stopping when told to is not a failure.
    signal.signal(signal.SIGTERM, _leave)
    with contextlib.suppress(KeyboardInterrupt):
        make_server(shutdown_seconds).run(sockets=[listener])


class Worker:
    """A process that serves on the shared socket, and the pipe that it answers on."""

    def __init__(self, listener: socket.socket, shutdown_seconds: int) -> None:
        self._answers, theirs = _processes.Pipe()
        self.process = _processes.Process(target=run_worker, args=(listener, shutdown_seconds, theirs))
        self.process.start()
        theirs.close()  # so that its death is the end of the pipe

    @property
    def pid(self) -> int | None:
        """Its process id."""
        return self.process.pid

    def ask(self, seconds: float, interrupted: Callable[[], bool]) -> bool | None:
        """Whether it serves already; None if it is dead, does not answer within ``seconds``, or is ``interrupted``."""
        deadline = time.monotonic() + seconds
        try:
            self._answers.send(None)
            while not (ready := wait([self._answers, self.process.sentinel], _TICK_SECONDS)):
                if interrupted() or time.monotonic() > deadline:
                    return None
            return bool(self._answers.recv()) if self._answers in ready else None
        except (OSError, EOFError):
            return None

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.join()
        self._answers.close()


class Supervisor:
    """Replaces workers that die or hang, takes them out of the gauges, and lets none outstay the end.

    ``SIGTERM`` and ``SIGINT`` stop all, ``SIGHUP`` replaces each worker once its successor serves.
    """

    def __init__(self, listener: socket.socket, workers: int, shutdown_seconds: int, metrics: str) -> None:
        self._listener = listener
        self._shutdown_seconds = shutdown_seconds
        self._metrics = metrics
        self._stopping = False
        self._restarting = False
        self._failed = False
        self._workers: list[Worker] = []
        self._counted: set[int | None] = set()
        self._wanted = workers

    def run(self) -> bool:
        """Supervise until a signal or a worker that cannot start ends it; False after the latter."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGHUP, self._restart)
        self._workers = [self._started() for _ in range(self._wanted)]
        while not self._stopping:
            wait([worker.process.sentinel for worker in self._workers], _TICK_SECONDS)
            if self._restarting:
                self._restarting = False
                self._replace_all()
            self._replace_the_dead()
        self._end_all()
        return not self._failed

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        self._stopping = True

    def _restart(self, signum: int, frame: FrameType | None) -> None:
        self._restarting = True

    def _is_stopping(self) -> bool:
        return self._stopping

    def _started(self) -> Worker:
        return Worker(self._listener, self._shutdown_seconds)

    def _replace_the_dead(self) -> None:
        for position, worker in enumerate(self._workers):
            answer = worker.ask(_ANSWER_SECONDS, self._is_stopping)
            if self._stopping:
                return
            if answer is None:
                self._replace(position, worker)
        self._forget_the_dead()

    def _replace(self, position: int, worker: Worker) -> None:
        worker.kill()
        if worker.process.exitcode == CANNOT_START:
            # The next one would fail the same way; the worker has said why.
            _logger.error("worker [%d] could not start, so the server ends", worker.pid)
            self._failed = self._stopping = True
        else:
            _logger.warning("worker [%d] died and is replaced", worker.pid)
            self._workers[position] = self._started()

    def _replace_all(self) -> None:
        """Start a successor of each worker, and end the worker once that serves; keep it if it does not."""
        for position, worker in enumerate(self._workers):
            successor = self._started()
            if not self._serves(successor):
                successor.kill()
                if not self._stopping:
                    _logger.error(
                        "worker [%d] did not start, so worker [%d] and those after it stay", successor.pid, worker.pid
                    )
                return
            self._workers[position] = successor
            worker.process.terminate()
            self._await_end(worker, self._longest_end())
        self._forget_the_dead()

    def _serves(self, worker: Worker) -> bool:
        deadline = time.monotonic() + _ANSWER_SECONDS
        while not self._stopping and time.monotonic() < deadline:
            served = worker.ask(deadline - time.monotonic(), self._is_stopping)
            if served is None or served:
                return bool(served)
            wait([worker.process.sentinel], 0.1)
        return False

    def _end_all(self) -> None:
        # A socket that is open here would let clients connect and wait in vain.
        self._listener.close()
        for worker in self._workers:
            worker.process.terminate()
        deadline = self._longest_end()
        for worker in self._workers:
            self._await_end(worker, deadline)

    def _longest_end(self) -> float:
        return time.monotonic() + self._shutdown_seconds + _CLOSE_SECONDS

    def _await_end(self, worker: Worker, deadline: float) -> None:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        if worker.process.is_alive():
            worker.kill()
            _logger.error("worker [%d] did not end in time and was killed", worker.pid)

    def _forget_the_dead(self) -> None:
        from token_id_capture.server.http.metrics import forget_process

        running = {worker.pid for worker in self._workers}
        for pid in self._counted - running:
            if pid is not None:
                forget_process(pid, self._metrics)
        self._counted = running


@contextlib.contextmanager
def _shared_metrics() -> Iterator[str]:
    """A directory that only this user can enter, told to the workers, and removed at the end.

    Those of servers that were killed with all their workers are removed first.
    """
    for path in abandoned(Path(tempfile.gettempdir()), f"{_METRICS_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(prefix=_METRICS_PREFIX, ignore_cleanup_errors=True) as directory,
        held(Path(directory)),
    ):
        os.environ[METRICS_VARIABLE] = directory
        yield directory


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    sys.exit(0)
