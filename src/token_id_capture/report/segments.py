"""Where messages begin in a prompt or an answer, read from the words with which chat templates mark them. Pure.

It only decides what a page folds and labels; nothing that is trained on depends on it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from enum import StrEnum
from itertools import accumulate
from typing import Final, TypeAlias


class Part(StrEnum):
    """What a stretch of text is."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"
    REASONING = "reasoning"
    TOOL_CALL = "tool_call"


Segment: TypeAlias = tuple[int, Part]
"""The token with which a part begins, and what it is; it ends where the next one begins."""

# ChatML, Llama 3, Harmony, Gemma, GLM and Phi, DeepSeek, Mistral; then what stands inside a message.
_MARKS: Final = re.compile(
    r"<\|im_start\|>(?P<chatml>\w+)"
    r"|<\|start_header_id\|>(?P<llama>\w+)"
    r"|<\|start\|>(?P<harmony>\w+)"
    r"|<start_of_turn>(?P<gemma>\w+)"
    r"|<\|(?P<glm>system|user|assistant|observation|tool)\|>"
    r"|<｜(?P<deepseek>User|Assistant|tool▁outputs▁begin)｜>"  # noqa: RUF001  (the model's own characters)
    r"|\[(?P<mistral>SYSTEM_PROMPT|INST|/INST|TOOL_RESULTS)\]"
    r"|(?P<inner></?think>|</?tool_call>|<tool_response>|\[TOOL_CALLS\]|<\|python_tag\|>|<｜tool▁calls▁begin｜>)"  # noqa: RUF001
)
_ROLES: Final = {
    "system": Part.SYSTEM,
    "developer": Part.SYSTEM,
    "SYSTEM_PROMPT": Part.SYSTEM,
    "user": Part.USER,
    "User": Part.USER,
    "INST": Part.USER,
    "assistant": Part.ASSISTANT,
    "Assistant": Part.ASSISTANT,
    "model": Part.ASSISTANT,
    "/INST": Part.ASSISTANT,
    "tool": Part.TOOL,
    "ipython": Part.TOOL,
    "observation": Part.TOOL,
    "function": Part.TOOL,
    "TOOL_RESULTS": Part.TOOL,
    "tool▁outputs▁begin": Part.TOOL,
    "<think>": Part.REASONING,
    "<tool_response>": Part.TOOL,
    "<tool_call>": Part.TOOL_CALL,
    "[TOOL_CALLS]": Part.TOOL_CALL,
    "<|python_tag|>": Part.TOOL_CALL,
    "<｜tool▁calls▁begin｜>": Part.TOOL_CALL,  # noqa: RUF001
}
_OF_ANSWERS: Final = frozenset({Part.REASONING, Part.TOOL_CALL})
_NOT_SAMPLED: Final = frozenset({Part.SYSTEM, Part.USER, Part.TOOL})
_OPENING: Final = 8
"""Tokens that open a message, at most."""


def segments_of(pieces: Sequence[str], *, within: Part | None = None) -> tuple[Segment, ...]:
    """The parts of a text that is given token by token; ``within`` is what the text before it was part of."""
    starts = [0, *accumulate(map(len, pieces))]
    found: dict[int, Part] = {}
    role, latest = within, -1
    for match in _MARKS.finditer("".join(pieces)):
        part = _ROLES.get(match[match.lastgroup or 0])
        if part is None and match.lastgroup != "inner":
            continue  # a role that nobody knows
        if (part is None or part in _OF_ANSWERS) and role in _NOT_SAMPLED:
            continue  # a system message that explains how to call tools
        # What ends a thought or a call of a tool ends behind its mark.
        token = bisect_right(starts, match.end() if part is None else match.start()) - 1
        inner = match.lastgroup == "inner"
        if inner and part is Part.TOOL and found.get(latest) is Part.USER and token - latest <= _OPENING:
            # Some templates give the result of a tool inside a message of the user.
            token = latest
        if part is not None and part not in _OF_ANSWERS:
            role = part
        found[token] = part or Part.ASSISTANT
        latest = token
    return tuple((token, part) for token, part in found.items() if token < len(pieces))
