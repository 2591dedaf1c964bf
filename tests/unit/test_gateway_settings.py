"""The settings of the gateway as its workers get them: through the environment, and as they were meant."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from token_id_capture.cli.serving.settings import WorkerSettings
from token_id_capture.server.settings import SESSION_HEADERS


def settings(**values: Any) -> WorkerSettings:
    given: dict[str, Any] = {"upstream": "http://engine:8000", "database": "/captures.db", **values}
    return WorkerSettings(**given)


def test_a_worker_reads_the_settings_that_its_parent_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    written = settings(
        engine="my_engine:It", streaming="never", tokenize_prompts=True, session_headers="X-Agent, x-session-id"
    )
    for name, value in written.as_environment().items():
        monkeypatch.setenv(name, value)
    assert WorkerSettings() == written
    assert written.session_headers == ("x-agent", "x-session-id")


def test_the_headers_of_known_harnesses_are_stored_unless_others_are_named() -> None:
    assert settings().session_headers == SESSION_HEADERS
    assert settings(session_headers=" , ").session_headers == ()


@pytest.mark.parametrize("name", ["Authorization", "x-api-key", "Cookie", "proxy-authorization"])
def test_a_header_that_holds_a_key_is_not_stored(name: str) -> None:
    with pytest.raises(ValidationError, match=f"{name.lower()} would be stored in the database"):
        settings(session_headers=f"x-session-id,{name}")


@pytest.mark.parametrize("value", ["sometimes", ""])
def test_streams_are_asked_for_in_one_of_three_ways(value: str) -> None:
    with pytest.raises(ValidationError, match="'auto', 'always' or 'never'"):
        settings(streaming=value)
