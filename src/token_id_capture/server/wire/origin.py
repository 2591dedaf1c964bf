"""Whose call it is, from the headers by which harnesses tell their sub-agents apart.

Claude Code, Codex and OpenCode send them; docs/harnesses.md says which. What names no agent leaves the
origin unknown, unless the path of the call names one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import orjson

from token_id_capture.lifecycle import MAIN_AGENT, CallOrigin, Purpose
from token_id_capture.recent import Newest
from token_id_capture.records import AGENT_MAX_LENGTH

_CODEX_METADATA = "x-codex-turn-metadata"
_CODEX_PURPOSES = {
    "turn": Purpose.TURN,
    "compaction": Purpose.COMPACTION,
    "prewarm": Purpose.PREWARM,
}


_MOST_SESSIONS: Final = 10_000


class StartedSessions:
    """The sessions of OpenCode that another session started, the ``most`` newest.

    OpenCode names the session that started one, and not whether that is the main agent's. A sub-agent calls
    before those that it starts, so a parent that is not known as a sub-agent is the main agent. Each process
    knows the sessions that it served; what another one served counts as the main agent's.
    """

    def __init__(self, most: int = _MOST_SESSIONS) -> None:
        self._started: Newest[str, None] = Newest(most)

    def parent_of(self, session: str, starter: str) -> str:
        """The agent that started ``session``, whose starter is a session too."""
        self._started[session] = None
        return starter if starter in self._started else MAIN_AGENT


def call_origin(headers: Mapping[str, str], named: str | None, started: StartedSessions) -> CallOrigin:
    """The origin that the headers tell. ``named`` is the agent that the path names, else None.

    A harness below a named agent's path is that agent, and its sub-agents are that agent's.
    """
    agent, parent, purpose = _told(headers, started)
    if named is not None:
        agent = named if agent in (None, MAIN_AGENT) else agent
        default = MAIN_AGENT if agent == named else named
        parent = default if parent in (None, MAIN_AGENT) else parent
    if agent == MAIN_AGENT:
        parent = None
    return CallOrigin(agent, parent, purpose)


def header_texts(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """The headers of an ASGI scope by their names in lower case, the first of each name."""
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in reversed([*headers])}


def session_headers(headers: Mapping[str, str], kept: Iterable[str]) -> dict[str, str] | None:
    """Those of the headers that are kept; None without any."""
    return {name: headers[name] for name in kept if name in headers} or None


def _told(headers: Mapping[str, str], started: StartedSessions) -> tuple[str | None, str | None, Purpose | None]:
    """Agent, parent and purpose; of the harnesses that are known, the first that shows."""
    if "x-claude-code-session-id" in headers or "x-claude-code-agent-id" in headers:
        return _agent(headers, "x-claude-code-agent-id", "x-claude-code-parent-agent-id", None)
    if "thread-id" in headers:
        turn = _codex_turn(headers)
        purpose = _CODEX_PURPOSES.get(str(turn.get("request_kind")))
        is_sub_agent = (
            "x-openai-subagent" in headers
            or "x-codex-parent-thread-id" in headers
            or turn.get("thread_source") == "subagent"
        )
        if not is_sub_agent:
            return MAIN_AGENT, None, purpose
        # The session has the id of its first thread, which is the main agent's.
        return _agent(headers, "thread-id", "x-codex-parent-thread-id", headers.get("session-id"), purpose)
    if "x-parent-session-id" in headers:
        agent, parent, purpose = _agent(headers, "x-session-id", "x-parent-session-id", None)
        if agent is not None and parent is not None:
            parent = started.parent_of(agent, parent)
        return agent, parent, purpose
    return (MAIN_AGENT if "x-session-id" in headers else None), None, None


def _agent(
    headers: Mapping[str, str], agent_header: str, parent_header: str, main: str | None, purpose: Purpose | None = None
) -> tuple[str | None, str | None, Purpose | None]:
    agent, parent = headers.get(agent_header, MAIN_AGENT), headers.get(parent_header, MAIN_AGENT)
    if not (0 < len(agent) <= AGENT_MAX_LENGTH and 0 < len(parent) <= AGENT_MAX_LENGTH):
        return None, None, purpose
    return agent, MAIN_AGENT if parent == main else parent, purpose


def _codex_turn(headers: Mapping[str, str]) -> Mapping[str, Any]:
    """What Codex says of the turn. It also holds paths and commits of the user's, which are not kept."""
    try:
        turn = orjson.loads(headers.get(_CODEX_METADATA, "{}"))
    except orjson.JSONDecodeError:
        return {}
    return turn if isinstance(turn, dict) else {}
