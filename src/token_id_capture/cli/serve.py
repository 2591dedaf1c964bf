"""``tokcap serve``: the gateway as a server of one or several processes.

The parent binds the socket and checks what it can before anything starts, so that a wrong port,
database or upstream is one line and not a crash loop. Workers get their settings through the
environment, and each opens the store for itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from token_id_capture.cli.common import DatabaseOption, fail
from token_id_capture.errors import ConfigurationError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from token_id_capture.cli.settings import GatewaySettings

_WORKER_APP = "token_id_capture.cli.serve:worker_app"
_BACKLOG = 2048
# Clients keep idle connections longer than uvicorn's five seconds; one that is closed under them
# costs them a call.
_KEEP_ALIVE_SECONDS = 120
_PROBE_SECONDS = 5.0


def serve(
    upstream: Annotated[
        str,
        typer.Option("--upstream", "-u", envvar="TOKCAP_UPSTREAM", metavar="URL", help="The engine's address."),
    ],
    database: DatabaseOption,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0 takes a free one.")] = 8400,
    workers: Annotated[int, typer.Option(min=1, help="Server processes; one that dies is replaced.")] = 1,
    engine: Annotated[
        str, typer.Option(envvar="TOKCAP_ENGINE", help="How the engine sends token ids: auto, message or vllm.")
    ] = "auto",
    grace: Annotated[int, typer.Option(min=0, help="Seconds that calls in flight may take when it stops.")] = 30,
    check_upstream: Annotated[bool, typer.Option(help="Start only if something listens at the upstream.")] = True,
) -> None:
    """Stand between agents and an engine, and capture the tokens of what rollouts generate.

    Give agents http://HOST:PORT/ng-rollout/ROLLOUT/training-token-capture as their base URL, with
    /v1 behind it where they expect that. Further settings are environment variables:
    TOKCAP_DRAIN_SECONDS (600), TOKCAP_READ_TIMEOUT (3600), TOKCAP_CONNECT_TIMEOUT (10),
    TOKCAP_BODY_LIMIT (67108864 bytes), and TOKCAP_LOG_PROBS_MODE, which is stored with each call.
    """
    settings = _settings(upstream, database, engine)
    if check_upstream:
        _check_upstream(settings.upstream)
    _check_database(settings.database)
    listener = _listener(host, port)
    os.environ.update(settings.as_environment())
    shown = f"[{host}]" if ":" in host else host
    print(f"listening on http://{shown}:{listener.getsockname()[1]}", file=sys.stderr, flush=True)
    _run(listener, workers, grace)


def worker_app() -> ASGIApp:
    """The application of one worker, with the settings of its environment."""
    import warnings

    from token_id_capture.cli.settings import GatewaySettings
    from token_id_capture.cli.worker import allow_many_connections, log_to_stderr, stop_with_parent
    from token_id_capture.server.app import create_app
    from token_id_capture.store import TokenCaptureStore, WalResetBugWarning

    log_to_stderr()
    allow_many_connections()
    stop_with_parent()
    warnings.simplefilter("ignore", WalResetBugWarning)  # the parent said it already
    settings = GatewaySettings()
    return create_app(
        settings.upstream,
        TokenCaptureStore(settings.database),
        engine=settings.engine,
        body_limit=settings.body_limit,
        drain_seconds=settings.drain_seconds,
        connect_timeout=settings.connect_timeout,
        read_timeout=settings.read_timeout,
        log_probs_mode=settings.log_probs_mode,
    )


def _settings(upstream: str, database: Path, engine: str) -> GatewaySettings:
    from pydantic import ValidationError

    from token_id_capture.cli.settings import GatewaySettings
    from token_id_capture.server.engines import make_engine
    from token_id_capture.server.upstream import parse_upstream

    parse_upstream(upstream)
    make_engine(engine)
    try:
        return GatewaySettings(upstream=upstream, database=str(database.absolute()), engine=engine)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigurationError(f"TOKCAP_{str(first['loc'][0]).upper()}: {first['msg']}") from error


def _check_upstream(url: str) -> None:
    from token_id_capture.server.upstream import parse_upstream

    parsed = parse_upstream(url)
    try:
        socket.create_connection((str(parsed.host), parsed.port or 80), _PROBE_SECONDS).close()
    except OSError as error:
        problem = error.strerror or str(error)
        fail(f"nothing listens at {url} ({problem}): start the engine first, or use --no-check-upstream")


def _check_database(database: str) -> None:
    """Open and close the store once. Its errors say which file it is and what to do."""
    from token_id_capture.store import TokenCaptureStore

    async def probe() -> None:
        store = TokenCaptureStore(database)
        try:
            await store.open()
        finally:
            await store.close()

    asyncio.run(probe())


def _listener(host: str, port: int) -> socket.socket:
    """A listening socket. It listens before the workers are up, so that early clients only wait."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        fail(f"cannot listen on {host}:{port} ({error.strerror or error}): choose another --host or --port")
    listener.set_inheritable(True)
    return listener


def _run(listener: socket.socket, workers: int, grace: int) -> None:
    import uvicorn
    from uvicorn.config import STARTUP_FAILURE
    from uvicorn.supervisors import Multiprocess

    from token_id_capture.cli.worker import log_to_stderr

    config = uvicorn.Config(
        _WORKER_APP,
        factory=True,
        workers=workers,
        backlog=_BACKLOG,
        lifespan="on",
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        # The engine's own headers are passed on.
        server_header=False,
        date_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=grace,
        timeout_worker_healthcheck=30,
    )
    if workers > 1:
        log_to_stderr()
        supervisor = Multiprocess(config, sockets=[listener])
        supervisor.run()
        if any(process.exitcode == STARTUP_FAILURE for process in supervisor.processes):
            raise typer.Exit(1)
        return
    # After its shutdown uvicorn raises the signal again; stopping when told to is no failure.
    signal.signal(signal.SIGTERM, _leave)
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    sys.exit(0)
