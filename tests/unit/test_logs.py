"""The log of a server process: one line a message, the call that it is about, and nothing that was confided."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator

import pytest

from support.memory_sink import MemorySink
from token_id_capture.cli.serving.logs import JsonFormatter, TextFormatter
from token_id_capture.errors import StoreClosedError
from token_id_capture.sink import CaptureContext, reset_token_sink, set_token_sink

CALL = "0f" * 16


@pytest.fixture
def in_a_call() -> Iterator[None]:
    token = set_token_sink(CaptureContext("math-1", CALL, MemorySink()))
    yield
    reset_token_sink(token)


def record(message: str, *arguments: object, error: BaseException | None = None, **more: object) -> logging.LogRecord:
    exc_info = None
    if error is not None:
        try:
            raise error
        except BaseException:
            exc_info = sys.exc_info()
    made = logging.LogRecord("somewhere", logging.WARNING, __file__, 1, message, arguments, exc_info)
    made.__dict__.update(more)
    return made


def quoting() -> ValueError:
    error = ValueError("the response was 'hush'")
    error.__cause__ = KeyError("hush")
    return error


@pytest.mark.usefixtures("in_a_call")
def test_a_line_names_its_call_once() -> None:
    formatter = TextFormatter()
    assert formatter.format(record("lost")).endswith(f"] lost (call {CALL!r} of rollout 'math-1')")
    assert formatter.format(record("%s is lost", CALL)).count(CALL) == 1
    line = json.loads(JsonFormatter().format(record("lost", fields={"status": 500})))
    assert (line["rollout_id"], line["model_call_id"], line["status"]) == ("math-1", CALL, 500)


def test_outside_a_call_there_is_none() -> None:
    assert TextFormatter().format(record("ready")).endswith("] ready")
    line = json.loads(JsonFormatter().format(record("ready")))
    assert set(line) == {"time", "level", "logger", "process", "message"}
    assert (line["level"], line["logger"]) == ("warning", "somewhere")
    assert line["time"].endswith("+00:00")


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_what_a_client_sent_cannot_look_like_a_line_of_its_own(formatter: logging.Formatter) -> None:
    assert formatter.format(record("path %s", "/x\r\n2026-01-01 ERROR \x1b[31m\ud800")).splitlines()[1:] == []


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_a_traceback_shows_where_but_quotes_no_value(formatter: logging.Formatter) -> None:
    shown = formatter.format(record("it failed", error=quoting()))
    assert "hush" not in shown
    assert "KeyError" in shown
    assert "ValueError" in shown
    assert "in record" in shown
    ours = formatter.format(record("it failed", error=StoreClosedError("the store is closed: open a new one")))
    assert "StoreClosedError: the store is closed: open a new one" in ours
