"""How a server process of ``tokcap serve`` behaves: its log, its limits, and its parent."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import sys
import threading

_CONNECTIONS = 65_536

# uvicorn's words on what the gateway does on purpose, and says itself: it refuses websockets, and
# breaks a reply whose source broke.
_EXPECTED = (
    "Unsupported upgrade request.",
    "No supported WebSocket library detected.",
    "ASGI callable returned without completing response.",
)


def log_to_stderr() -> None:
    """One line a message on standard error: warnings, and of uvicorn's news that a worker died."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s [%(process)d] %(message)s"))
    handler.addFilter(_worth_saying)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("uvicorn.error").setLevel(logging.INFO)


def _worth_saying(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    if record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError):
        record.msg, record.args = "a call was cut off by the end of the server; its open intent says so", None
        record.exc_info = None
        return True
    if record.levelno < logging.WARNING:
        return message.startswith("Child process") and message.endswith("died")
    return not message.startswith(_EXPECTED)


def allow_many_connections() -> None:
    """Raise the soft limit of open files: each call in flight holds two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, _CONNECTIONS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def stop_with_parent() -> None:
    """Stop when the parent is gone, however it went: nobody would stop this worker then, and it holds the port."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()
