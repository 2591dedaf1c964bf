"""Start the command many times in the time of one: import it once, then fork for each run.

Each run is a process of its own, with its own arguments, environment, directory and standard
streams, and all but its very end is that of the installed script. Only the imports are shared, which take most of
the time of a short command. ``conftest`` talks to this program over a socket, its one argument.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import sys
from collections.abc import Iterator

import token_id_capture.cli.main
from support.quick_end import quick_end

# What commands import late, inside their functions.
LIBRARIES = ("aiohttp", "alembic.config", "alembic.runtime.migration", "pyarrow.parquet")
PACKAGES = ("cli", "explanation", "export", "finalize", "hand_off", "outputs", "report", "server", "store")


def late() -> Iterator[str]:
    """The names of all that commands import late."""
    yield from LIBRARIES
    for name in PACKAGES:
        package = importlib.import_module(f"token_id_capture.{name}")
        yield from (one.name for one in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))


def serve(requests: socket.socket) -> None:
    """Fork for each request; returns only in the children, which are then the command."""
    while True:
        message, streams, _, _ = socket.recv_fds(requests, 1 << 20, maxfds=3)
        if not message:
            os._exit(0)
        child = os.fork()
        if child == 0:
            become(json.loads(message), streams, requests)
            return
        for stream in streams:
            os.close(stream)
        _, status = os.waitpid(child, 0)
        requests.sendall(json.dumps(os.waitstatus_to_exitcode(status)).encode())


def become(request: dict[str, object], streams: list[int], requests: socket.socket) -> None:
    """Take over the arguments, environment, directory and streams of the command."""
    requests.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[call-overload]
    os.chdir(str(request["directory"]))
    sys.argv = ["tokcap", *request["arguments"]]  # type: ignore[misc]
    signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    for name in late():
        importlib.import_module(name)
    gc.freeze()  # else each child copies every page that its collector looks at
    serve(socket.socket(fileno=int(sys.argv[1])))
    with quick_end():
        token_id_capture.cli.main.main()
