"""Forks children that have imported the package already and opened no store: one costs milliseconds.

Run by ``children.Children``, with a socket as its standard input. A request is a JSON line; ``start``
forks a child that runs a function of ``programs`` and then ends, see ``quick_end``.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
import traceback
import warnings
from typing import Any

from support import outages, programs, taking
from support.quick_end import quick_end


def serve(connection: socket.socket) -> dict[str, Any] | None:
    """Answer requests until there are no more; in a forked child, return what it has to run."""
    with connection.makefile("rw") as lines:
        for line in lines:
            request: dict[str, Any] = json.loads(line)
            if "start" in request:
                pid = os.fork()
                if pid == 0:
                    return request
                answer: Any = pid
            else:
                ended, status = os.waitpid(request["poll"], os.WNOHANG)
                answer = os.waitstatus_to_exitcode(status) if ended else None
            print(json.dumps(answer), file=lines, flush=True)
    return None


def run(request: dict[str, Any]) -> None:
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    if request["control"]:
        ctypes.CDLL(None).attach(request["control"].encode(), request["trace"].encode())
    warnings.simplefilter("error")
    (program,) = (found for one in (programs, outages, taking) if (found := getattr(one, request["start"], None)))
    program(*request["arguments"])


if __name__ == "__main__":
    work = serve(socket.socket(fileno=os.dup(0)))
    if work is not None:
        with quick_end():
            try:
                run(work)
            except Exception:
                traceback.print_exc()
                sys.exit(1)
