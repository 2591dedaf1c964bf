"""``tokcap view``: rollouts as they run, in a browser."""

from __future__ import annotations

import contextlib
import logging
import secrets
from pathlib import Path
from typing import Annotated

import typer

from token_id_capture.cli.options import DatabaseFileOption, report
from token_id_capture.cli.output.database import database_file, reading
from token_id_capture.cli.output.evidence import RecordsOption, told_in
from token_id_capture.cli.output.tokenizer import vocabulary
from token_id_capture.cli.serving.keys import check_key_file, read_key
from token_id_capture.cli.serving.listening import address_of, is_loopback, listener_at, shown_address

_STARTED = "view {} at http://{}/?{} (read-only; Ctrl-C ends it)"
_CLIENT_SECONDS = 60.0


def view(
    database: DatabaseFileOption,
    host: Annotated[
        str, typer.Option("--host", help="The address to listen on; any address but loopback needs a key.")
    ] = ("127.0.0.1"),
    port: Annotated[int, typer.Option("--port", "-p", min=0, max=65_535, help="0 takes a free one.")] = 8002,
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", metavar="PATH", help="The policy's tokenizer.json: show the text of tokens too."),
    ] = None,
    records: RecordsOption = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            metavar="PATH",
            help="A file with the key that viewers need; by default a new key is made and printed.",
        ),
    ] = None,
) -> None:
    """Follow rollouts in a browser, live, while others write them.

    The left side lists the rollouts, which you can search and filter. The right side shows one as a conversation, as
    tokcap report does, updated as calls are stored, or plots of all. It is read-only, listens on loopback, and requires
    the key in the address that it prints. From another machine, forward the port, ssh -L 8002:127.0.0.1:8002 HOST, or
    set a key and an address.
    """
    import uvicorn

    from token_id_capture.view.access import KEY_PARAMETER
    from token_id_capture.view.app import make_app

    path = database_file(database, "tokcap report also shows the rollouts of a server")
    with reading(database):
        pass  # whatever is wrong with the file is said now, not on a page
    if api_key_file is not None:
        check_key_file(api_key_file)
    where = address_of(host, port, guarded=api_key_file is not None, instead="give --api-key-file")
    # What a build logs is part of what the page shows.
    logging.getLogger("token_id_capture").addHandler(logging.NullHandler())
    key = secrets.token_urlsafe(24) if api_key_file is None else read_key(api_key_file)
    app = make_app(
        path,
        key,
        told=told_in(records),
        vocabulary=None if tokenizer is None else vocabulary(tokenizer),
        loopback=is_loopback(where),
    )
    with listener_at(where, _CLIENT_SECONDS) as listener:
        # A key of a file is known to those who may look, and stays out of what terminals keep.
        shown = key if api_key_file is None else "KEY"
        report(_STARTED.format(path, shown_address(listener), f"{KEY_PARAMETER}={shown}"))
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        # This cuts the streams of open pages off, which is not an error.
        logging.getLogger("uvicorn.error").addFilter(lambda record: not server.should_exit)
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listener])
