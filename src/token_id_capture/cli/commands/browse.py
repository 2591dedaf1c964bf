"""``tokcap browse``: the database in a browser, for many."""

from __future__ import annotations

import contextlib
import secrets
from typing import Annotated

import typer

from token_id_capture.cli.options import DatabaseFileOption, fail, report
from token_id_capture.cli.output.database import database_file
from token_id_capture.cli.serving.listening import address_of, listener_at, shown_address

_STARTED = "browse {} at http://{}/captures?{} (read-only; Ctrl-C ends it)"
_CLIENT_SECONDS = 60.0


def browse(
    database: DatabaseFileOption,
    host: Annotated[str, typer.Option("--host", help="An address of this machine's loopback.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", "-p", min=0, max=65_535, help="0 takes a free one.")] = 8001,
) -> None:
    """Browse a database with Datasette, while others write it.

    Shows tables, views, sample queries and your own SQL, with token columns as numbers. Every page is also available
    as JSON and CSV. It is read-only, listens on loopback, and requires the key in the address that it prints. From
    another machine, forward the port: ssh -L 8001:127.0.0.1:8001 HOST. Needs the extra browse.
    """
    from token_id_capture.store.file.read_only import read_only

    path = database_file(
        database, "browse a server with pgAdmin or psql, or copy rollouts to a file with tokcap copy and browse that"
    )
    with read_only(path):
        pass  # whatever is wrong with the file is said now, not on a page
    try:
        from token_id_capture.browse.site import make_site
        from token_id_capture.view.access import KEY_PARAMETER
    except ModuleNotFoundError as error:
        missing = (error.name or "Datasette").partition(".")[0]
        fail(f"tokcap browse needs {missing}: pip install 'token-id-capture[browse]'")
    import uvicorn

    where = address_of(host, port, guarded=False, instead="anyone who reaches it could read every token; use 127.0.0.1")
    with listener_at(where, _CLIENT_SECONDS) as listener:
        key = secrets.token_urlsafe(24)
        config = uvicorn.Config(make_site(path, key), log_level="warning", lifespan="on")
        report(_STARTED.format(path, shown_address(listener), f"{KEY_PARAMETER}={key}"))
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])
