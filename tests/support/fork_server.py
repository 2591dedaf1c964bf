"""Start the command many times in the time of one: import it once, then fork for each run.

Each run is a process of its own, with its own arguments, environment, directory and standard
streams, and it ends as the installed script does. Only the imports are shared, which take most of
the time of a short command. ``conftest`` talks to this program over a socket, its one argument.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys

import token_id_capture.cli.main
import token_id_capture.finalize.batch  # with the store, which nearly every command imports late


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
    gc.freeze()  # else each child copies every page that its collector looks at
    serve(socket.socket(fileno=int(sys.argv[1])))
    token_id_capture.cli.main.main()
