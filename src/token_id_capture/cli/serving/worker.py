"""One server process of ``tokcap serve``: its server, its application, its limits, and its parent."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import resource
import shutil
import signal
import socket
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvicorn

from token_id_capture.cli.serving.connections import limited_protocol
from token_id_capture.cli.serving.keys import read_key
from token_id_capture.cli.serving.logs import log_to_stderr
from token_id_capture.cli.serving.settings import WorkerSettings
from token_id_capture.collector import collect_rarely
from token_id_capture.errors import ConfigurationError
from token_id_capture.server.listener import BACKLOG

if TYPE_CHECKING:
    from starlette.types import ASGIApp

METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""The directory that the workers share for their numbers, as prometheus_client calls it."""

CANNOT_START: Final = 3
"""The exit code of a worker that ended before it served; uvicorn's own is the same."""

_WORKER_APP: Final = f"{__name__}:worker_app"
# Clients keep idle connections longer than uvicorn's five seconds; one that is closed under them
# costs them a call.
_KEEP_ALIVE_SECONDS: Final = 120

_CONNECTIONS = 65_536
_OTHER_FILES = 128


def make_server(shutdown_seconds: int) -> uvicorn.Server:
    """The server of one worker, on a socket that it is given. Raises the limit of open files as far as allowed."""
    files = _allow_many_files()
    settings = WorkerSettings()
    # What is not for calls to the engine, the database and the rest is for connections.
    connections = max(1, files - _possible_calls(settings.max_concurrent_calls, files) - _OTHER_FILES)
    return uvicorn.Server(
        uvicorn.Config(
            _WORKER_APP,
            factory=True,
            http=limited_protocol(min(settings.head_timeout, settings.client_timeout), connections),
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
        )
    )


def run_worker(listener: socket.socket, shutdown_seconds: int, health: Connection[bool, None]) -> None:
    """Serve in a process of its own, and answer on ``health`` whether it serves yet."""
    server = make_server(shutdown_seconds)

    def answer() -> None:
        with contextlib.suppress(OSError, EOFError):  # the parent is gone
            while True:
                health.recv()
                health.send(server.started)

    threading.Thread(target=answer, name="health", daemon=True).start()
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        pass  # of a terminal, to all of the group: the server has stopped as it should
    finally:
        if not server.started:
            sys.exit(CANNOT_START)


def worker_app() -> ASGIApp:
    """The application of one worker, with the settings of its environment."""
    settings = WorkerSettings()
    log_to_stderr(settings.log_format, access_log=settings.access_log)
    _stop_with_parent()
    try:
        app = _app(settings)
    except ConfigurationError as error:
        logging.getLogger(__name__).error("%s", error)
        sys.exit(CANNOT_START)
    collect_rarely()
    return app


def _app(settings: WorkerSettings) -> ASGIApp:
    from token_id_capture.hand_off.routes import HandOff
    from token_id_capture.server.app import create_app
    from token_id_capture.server.http.auth import KeyedApp
    from token_id_capture.store import TokenCaptureStore

    api_key, upstream_api_key, hand_off_key, operator_key = (
        None if path is None else read_key(path)
        for path in (
            settings.api_key_file,
            settings.upstream_api_key_file,
            settings.hand_off_key_file,
            settings.operator_key_file,
        )
    )
    shared = os.environ.get(METRICS_VARIABLE)
    store = TokenCaptureStore(
        settings.database, file_id=settings.database_id, free_space_floor=settings.free_space_floor
    )
    calls = _possible_calls(settings.max_concurrent_calls, _allow_many_files())
    return create_app(
        settings.upstream,
        store,
        engine=settings.engine,
        settings=settings.model_copy(update={"max_concurrent_calls": calls}),
        api_key=api_key,
        upstream_api_key=upstream_api_key,
        hand_off=None if hand_off_key is None else KeyedApp(HandOff(store).app(), hand_off_key),
        operator_key=operator_key,
        shared_upstreams=None if shared is None else Path(shared, "upstreams.json"),
    )


def _allow_many_files() -> int:
    """Raise the soft limit of open files, as each call in flight holds two; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = _CONNECTIONS if hard == unlimited else min(hard, _CONNECTIONS)
    if soft != unlimited and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted if soft == unlimited else max(soft, wanted)


def _possible_calls(wanted: int, files: int) -> int:
    """As many concurrent calls as wanted (0: any number) and as the limit of open files allows: a 503 before a call is
    sent is better than a connection that cannot be opened."""
    possible = max(1, (files - _OTHER_FILES) // 2)
    return min(wanted, possible) if wanted else possible


def _stop_with_parent() -> None:
    """Stop when the parent is gone, however it went: nobody would stop this worker then, and it holds the port."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        if (metrics := os.environ.get(METRICS_VARIABLE)) is not None:
            # The parent's to remove; what is mapped already can still be counted in.
            shutil.rmtree(metrics, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()
