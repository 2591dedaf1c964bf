"""``tokcap browse``: the database in a browser, for many."""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import socket
from typing import Annotated

import typer

from token_id_capture.cli.options import DatabaseOption, fail, report
from token_id_capture.cli.output.database import database_file

_STARTED = "browse {} at http://{}:{}/captures?{} (read-only; Ctrl-C ends it)"


def browse(
    database: DatabaseOption,
    host: Annotated[str, typer.Option("--host", help="An address of this machine's loopback.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", "-p", min=0, max=65_535, help="0 takes a free one.")] = 8001,
) -> None:
    """Browse a database with Datasette, while others write it.

    Tables, views, ready-made queries and SQL of one's own, with token columns as numbers; every page is also there
    as JSON and CSV. Read-only, on loopback, and only for who has the key in the address that it prints: from
    another machine, forward the port, as with ssh -L 8001:127.0.0.1:8001. Needs the extra browse.
    """
    from token_id_capture.store.file.read_only import read_only

    path = database_file(
        database, "browse a server with pgAdmin or psql, or copy rollouts to a file with tokcap copy and browse that"
    )
    with read_only(path):
        pass  # whatever is wrong with the file is said now, not on a page
    try:
        from token_id_capture.browse.access import KEY_PARAMETER
        from token_id_capture.browse.site import make_site
    except ModuleNotFoundError as error:
        missing = (error.name or "Datasette").partition(".")[0]
        fail(f"tokcap browse needs {missing}: pip install 'token-id-capture[browse]'")
    import uvicorn

    with _listener(host, port) as listener:
        key = secrets.token_urlsafe(24)
        config = uvicorn.Config(make_site(path, key), log_level="warning", lifespan="on")
        name, number = listener.getsockname()[:2]
        shown = f"[{name}]" if ":" in name else name
        report(_STARTED.format(path, shown, number, f"{KEY_PARAMETER}={key}"))
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])


def _listener(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        fail(f"cannot listen on {host}: {error.strerror}")
    if not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        fail(f"{host} can be reached from other machines, and every token could be read there: use 127.0.0.1")
    from token_id_capture.server.listener import listen

    try:
        return listen(family, address)
    except OSError as error:
        fail(f"cannot listen on port {port} of {host}: {error.strerror}; choose another one with --port")
