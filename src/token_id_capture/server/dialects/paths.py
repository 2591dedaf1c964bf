"""Which calls of clients are translated, by their path.

Harnesses put their paths behind base URLs that may end in ``/v1`` or in a slash, so that ``/v1`` may come twice,
once or not at all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final
from urllib.parse import unquote

from token_id_capture.server.dialects.chat import Dialect


class Action(StrEnum):
    """What a path asks for."""

    GENERATE = "generate"
    COUNT = "count"


@dataclass(frozen=True, slots=True)
class Target:
    """A path of a dialect. ``model`` and ``streams`` are in the paths of Gemini alone."""

    dialect: Dialect
    action: Action = Action.GENERATE
    model: str = ""
    streams: bool = False


_OPENAI_STYLE: Final = re.compile(r"(?:/v1){0,2}/(messages|messages/count_tokens|responses)/?")
_GEMINI: Final = re.compile(
    r"(?:/v1)?/(?:v1beta|v1|v1alpha)/models/(.*):(generateContent|streamGenerateContent|countTokens)/?"
)
_BY_STEP: Final = {
    "messages": Target(Dialect.MESSAGES),
    "messages/count_tokens": Target(Dialect.MESSAGES, Action.COUNT),
    "responses": Target(Dialect.RESPONSES),
}


def target_of(path: str) -> Target | None:
    """What ``path``, without the rollout's prefix and without a query, asks for; None if it is of no dialect."""
    if match := _OPENAI_STYLE.fullmatch(path):
        return _BY_STEP[match[1]]
    if match := _GEMINI.fullmatch(path):
        action = Action.COUNT if match[2] == "countTokens" else Action.GENERATE
        return Target(Dialect.GEMINI, action, unquote(match[1]), match[2] == "streamGenerateContent")
    return None


def dialect_of(path: str) -> Dialect | None:
    """The dialect of a path that may still have the rollout's prefix; None for a native one.

    An error that is answered before the prefix is read must reach the client in its own envelope too.
    """
    if path.endswith(("/messages", "/messages/count_tokens", "/messages/")):
        return Dialect.MESSAGES
    if path.endswith(("/responses", "/responses/")):
        return Dialect.RESPONSES
    return Dialect.GEMINI if _GEMINI.search(path) else None
