"""What the demo's agents live through, and what must become of their rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from token_id_capture import reasons

MODEL: Final = "demo-policy"
POLICY_SEED: Final = 20_26
TURNS: Final = 5
MISHAP_TURN: Final = 2
"""The turn, counted from 0, in which the retry, the compaction and the loss happen: mid-chain."""

HELD_TEXT: Final = "Take your time with this one."
"""What the user says before the call that is lost; the engine holds the first such call."""

TOOLS: Final[list[dict[str, Any]]] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the town's archive.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}},
                "required": ["query"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]

SUMMARY: Final = "Earlier turns, in short: the user asked about the town, and the archive was searched."


@dataclass(frozen=True)
class Story:
    """One rollout. ``mask_reason`` is why it must be masked, None if it must be delivered."""

    rollout_id: str
    what: str
    stream: bool = False
    retries: bool = False
    compacts: bool = False
    loses: bool = False
    mask_reason: str | None = None


STORIES: Final = (
    Story("steady-1", "whole responses"),
    Story("steady-2", "whole responses"),
    Story("steady-3", "streamed responses", stream=True),
    Story("steady-4", "streamed responses", stream=True),
    Story("retry-1", "asked twice", retries=True),
    Story("retry-2", "asked twice, streamed", stream=True, retries=True),
    Story("compacted", "summarised its history", stream=True, compacts=True),
    Story("lost-call", "its worker was killed", loses=True, mask_reason=reasons.CAPTURE_INCOMPLETE),
)


def run_tool(name: str, arguments: str) -> str:
    """The agents' tools; what the model wrote goes back to it as text."""
    if name == "search":
        return f"2 documents match {arguments.strip()}: “Zürich 1848”, “Köln 1793”."
    return "It is noon."
