"""Whose call it is, as the headers of harnesses tell it."""

from __future__ import annotations

import json

import pytest
from starlette.datastructures import Headers

from token_id_capture.lifecycle import CallOrigin, Purpose
from token_id_capture.server.wire.origin import StartedSessions, call_origin

CLAUDE = {"x-claude-code-session-id": "s"}
CODEX = {"thread-id": "t0", "session-id": "t0"}


def codex(**turn: str) -> dict[str, str]:
    return {**CODEX, "x-codex-turn-metadata": json.dumps(turn)}


@pytest.mark.parametrize(
    ("headers", "origin"),
    [
        ({}, CallOrigin()),
        (CLAUDE, CallOrigin("main")),
        ({**CLAUDE, "X-Claude-Code-Agent-Id": "a1"}, CallOrigin("a1", "main")),
        (
            {**CLAUDE, "x-claude-code-agent-id": "a2", "x-claude-code-parent-agent-id": "a1"},
            CallOrigin("a2", "a1"),
        ),
        (CODEX, CallOrigin("main")),
        (codex(request_kind="turn"), CallOrigin("main", None, Purpose.TURN)),
        (codex(request_kind="compaction"), CallOrigin("main", None, Purpose.COMPACTION)),
        (codex(request_kind="prewarm"), CallOrigin("main", None, Purpose.PREWARM)),
        (codex(request_kind="something new"), CallOrigin("main")),
        ({**CODEX, "x-codex-turn-metadata": "no json"}, CallOrigin("main")),
        ({**CODEX, "x-codex-turn-metadata": "[1]"}, CallOrigin("main")),
        ({**CODEX, "thread-id": "t1", "x-codex-parent-thread-id": "t0"}, CallOrigin("t1", "main")),
        ({**CODEX, "thread-id": "t2", "x-codex-parent-thread-id": "t1"}, CallOrigin("t2", "t1")),
        ({**CODEX, "thread-id": "t1", "x-openai-subagent": "collab_spawn"}, CallOrigin("t1", "main")),
        ({**codex(thread_source="subagent"), "thread-id": "t1"}, CallOrigin("t1", "main")),
        ({"x-session-id": "s"}, CallOrigin("main")),
        ({"x-session-id": "s1", "x-parent-session-id": "s"}, CallOrigin("s1", "main")),
        ({**CLAUDE, "x-claude-code-agent-id": "x" * 201}, CallOrigin()),
    ],
)
def test_a_harness_tells_its_agent(headers: dict[str, str], origin: CallOrigin) -> None:
    assert call_origin(Headers(headers), None, StartedSessions()) == origin


@pytest.mark.parametrize(
    ("headers", "origin"),
    [
        ({}, CallOrigin("planner", "main")),
        (CLAUDE, CallOrigin("planner", "main")),
        ({**CLAUDE, "x-claude-code-agent-id": "a1"}, CallOrigin("a1", "planner")),
    ],
)
def test_a_harness_below_a_named_path_is_that_agent(headers: dict[str, str], origin: CallOrigin) -> None:
    assert call_origin(Headers(headers), "planner", StartedSessions()) == origin


def test_the_path_can_name_the_main_agent() -> None:
    assert call_origin(Headers({}), "main", StartedSessions()) == CallOrigin("main")


def test_a_session_that_a_sub_agent_of_opencode_started_is_that_agents() -> None:
    started = StartedSessions(most=2)

    def of(session: str, parent: str) -> CallOrigin:
        return call_origin(Headers({"x-session-id": session, "x-parent-session-id": parent}), None, started)

    assert [of("s1", "s"), of("s2", "s1"), of("s1", "s"), of("s2", "s1")] == [
        CallOrigin("s1", "main"),
        CallOrigin("s2", "s1"),
    ] * 2
    assert of("s3", "s2") == CallOrigin("s3", "s2")
    assert of("s4", "s1") == CallOrigin("s4", "main")  # too long ago
