"""Runs the server: one worker in this process, or several under supervision."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from types import FrameType
from typing import NoReturn

import typer
import uvicorn
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess
from uvicorn.supervisors.multiprocess import Process

from token_id_capture.cli.options import LogFormat
from token_id_capture.cli.serving.logs import log_to_stderr
from token_id_capture.cli.serving.worker import METRICS_VARIABLE
from token_id_capture.server.listener import BACKLOG

_logger = logging.getLogger(__name__)

_WORKER_APP = "token_id_capture.cli.serving.worker:worker_app"
# Clients keep idle connections longer than uvicorn's five seconds; one that is closed under them
# costs them a call.
_KEEP_ALIVE_SECONDS = 120
_TICK_SECONDS = 0.5
_CLOSE_SECONDS = 10
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
    config = uvicorn.Config(
        _WORKER_APP,
        factory=True,
        workers=workers,
        backlog=BACKLOG,
        lifespan="on",
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        # The engine's own headers are passed on.
        server_header=False,
        date_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=shutdown_seconds,
        timeout_worker_healthcheck=30,
    )
    if workers > 1:
        log_to_stderr(log_format)
        with _shared_metrics() as metrics:
            supervisor = Supervisor(config, listener, metrics)
            supervisor.run()
        if any(process.exitcode == STARTUP_FAILURE for process in supervisor.processes):
            raise typer.Exit(1)
        return
    # After its shutdown uvicorn raises the signal again; stopping when told to is no failure.
    signal.signal(signal.SIGTERM, _leave)
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])


class Supervisor(Multiprocess):
    """Replaces workers that die, takes them out of the gauges, and lets none outstay the end."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket, metrics: str) -> None:
        super().__init__(config, [listener])
        self._metrics = metrics
        self._counted: set[int | None] = set()

    def keep_subprocess_alive(self) -> None:
        """Replace the workers that are dead or hang. Called twice a second."""
        for position, worker in enumerate(self.processes):
            if self.should_exit.is_set():
                break
            if not self._answers(worker):
                self._replace(position, worker)
        running = {worker.pid for worker in self.processes}
        for pid in self._counted - running:
            self._forget(pid)
        self._counted = running

    def _answers(self, worker: Process) -> bool:
        """Whether the worker lives and answers, or a signal is more urgent than to know.

        Unlike uvicorn's own question this one notices a death while it waits.
        """
        deadline = time.monotonic() + self.config.timeout_worker_healthcheck
        try:
            worker.parent_conn.send(b"ping")
            while not (ready := wait([worker.parent_conn, worker.process.sentinel], _TICK_SECONDS)):
                if self.signal_queue:
                    return True
                if time.monotonic() > deadline:
                    return False
            if worker.parent_conn in ready:
                worker.parent_conn.recv()
        except (OSError, EOFError):
            return False
        return worker.process.is_alive()

    def _replace(self, position: int, worker: Process) -> None:
        worker.kill()
        worker.join()
        if worker.exitcode == STARTUP_FAILURE:
            # The next one would fail the same way; the worker has said why.
            _logger.error("worker [%d] could not start, so the server ends", worker.pid)
            self.should_exit.set()
            return
        _logger.warning("worker [%d] died and is replaced", worker.pid)
        self.processes[position] = replacement = Process(self.config, self.sockets)
        replacement.start()

    def terminate_all(self) -> None:
        """Tell all workers to end. A socket that is open here would let clients connect and wait in vain."""
        for listener in self.sockets:
            listener.close()
        super().terminate_all()

    def join_all(self) -> None:
        """Wait for all workers, and kill those that take too long."""
        deadline = time.monotonic() + (self.config.timeout_graceful_shutdown or 0) + _CLOSE_SECONDS
        for worker in self.processes:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
                _logger.error("worker [%d] did not end in time and was killed", worker.pid)

    def _forget(self, pid: int | None) -> None:
        from token_id_capture.server.http.metrics import forget_process

        if pid is not None:
            forget_process(pid, self._metrics)


@contextlib.contextmanager
def _shared_metrics() -> Iterator[str]:
    """A directory that only this user can enter, told to the workers, and removed at the end."""
    with tempfile.TemporaryDirectory(prefix="tokcap-metrics-", ignore_cleanup_errors=True) as directory:
        os.environ[METRICS_VARIABLE] = directory
        yield directory


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    sys.exit(0)
