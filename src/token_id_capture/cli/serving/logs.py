"""The log of a server process on standard error: lines for people, or JSON objects for programs.

Each line names the call that it is about. Neither has keys, bodies or tokens in it: requests and
responses are never logged, and of a foreign exception whose message may quote a value only the type.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import sys
import time
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from token_id_capture.capture.context import current_capture_context
from token_id_capture.cli.options import LogFormat, printable, show_warnings
from token_id_capture.errors import TokenCaptureError

_ACCESS_LOGGER = "token_id_capture.access"

# uvicorn's words on what the gateway does on purpose, and says itself: it refuses websockets, and
# breaks a response whose source broke.
_EXPECTED = (
    "Unsupported upgrade request.",
    "No supported WebSocket library detected.",
    "ASGI callable returned without completing response.",
)

# What somebody without a key can cause as often as they like.
_REPEATED = ("Invalid HTTP request received.", "socket.accept() out of system resource")


def log_to_stderr(log_format: LogFormat, *, access_log: bool = False) -> None:
    """Log warnings, and with ``access_log`` every request."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    handler.addFilter(_worth_saying)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger(_ACCESS_LOGGER).setLevel(logging.INFO if access_log else logging.WARNING)
    logger = logging.getLogger("token_id_capture")
    show_warnings(lambda message: logger.warning("%s", message))


def announce(message: str, log_format: LogFormat) -> None:
    """Say something that is not a warning: a bare line, or a JSON object among the others."""
    print(_json_line(message, logging.INFO) if log_format == "json" else message, file=sys.stderr, flush=True)


def warn_in_json() -> None:
    """Make JSON objects of warnings from now on: the start of a server warns before its workers log."""
    show_warnings(lambda message: print(_json_line(message, logging.WARNING), file=sys.stderr, flush=True))


def _json_line(message: str, level: int) -> str:
    return JsonFormatter().format(logging.LogRecord("token_id_capture.cli", level, "", 0, message, None, None))


class TextFormatter(logging.Formatter):
    """Time, level, process and message, and the call where the message does not name it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s [%(process)d] %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging calls it so
        """One line: what a client or an engine sent must not look like another."""
        line = printable(super().formatMessage(record))
        context = current_capture_context()
        if context is not None and context.model_call_id not in line:
            line += f" (call {context.model_call_id!r} of rollout {context.rollout_id!r})"
        return line

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """Where it was raised, and what."""
        return "\n".join(_told(ei[1]))


class JsonFormatter(logging.Formatter):
    """``time``, ``level``, ``logger``, ``process``, ``message``; of a call its ids; of an error its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """One JSON object."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        context = current_capture_context()
        if context is not None:
            line |= {"rollout_id": context.rollout_id, "model_call_id": context.model_call_id}
        line |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[1] is not None:
            line["traceback"] = "\n".join(_told(record.exc_info[1]))
        # Not orjson, which refuses a lone surrogate; the log must take whatever came.
        return json.dumps(line, default=str)


def _told(error: BaseException | None) -> Iterator[str]:
    """The lines of a traceback, with the causes first, and without messages that may quote a value."""
    if error is None:
        return
    cause = error.__cause__ if error.__cause__ is not None or error.__suppress_context__ else error.__context__
    if cause is not None:
        yield from _told(cause)
        yield "which led to:"
    for frame in traceback.extract_tb(error.__traceback__):
        yield f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}'
    quotes = isinstance(error, ValueError | LookupError) and not isinstance(error, TokenCaptureError)
    message = "" if quotes else printable(str(error))
    yield f"{type(error).__name__}: {message}" if message else type(error).__name__


def _worth_saying(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    if record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError):
        record.msg, record.args = "a call was cut off when the server ended; its intent stays open", None
        record.exc_info = None
        return True
    if record.name == "uvicorn.error" and message.startswith("Traceback"):
        # Why the application could not start, as Starlette passes it: its last line is for people.
        record.msg, record.args = message.strip().splitlines()[-1], None
    if message.startswith(_REPEATED):
        return _not_within_a_second(message)
    return not message.startswith(_EXPECTED)


_said_at: dict[str, float] = {}


def _not_within_a_second(message: str) -> bool:
    now = time.monotonic()
    if now - _said_at.get(message, -math.inf) < 1.0:
        return False
    _said_at[message] = now
    return True
