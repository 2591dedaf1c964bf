"""Where the prompt of a call came from: the template alone, or the exact tokens of an earlier call.

``--continuity`` recognises by its content which captured call a request continues, and gives the
engine that call's exact tokens instead of a new rendering of its history.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Policy(StrEnum):
    """Where exact tokens are sent in place of the template's prompt."""

    OFF = "off"
    """Nowhere."""
    TEMPLATE = "template"
    """Where both prompts read the same, so that only the cut into tokens differs."""
    EXACT = "exact"
    """Wherever a captured call is continued."""


class Mode(StrEnum):
    """What the engine was given."""

    SPLICED = "spliced"
    """The exact tokens of an earlier call, and what the template writes after its answer."""
    CLEAN = "clean"
    """The template's prompt, which begins with the exact tokens of the earlier call."""
    PLAIN = "plain"
    """The template's prompt; the reason says why."""


@dataclass(frozen=True, slots=True)
class Continuity:
    """How the prompt of one call was made; lengths and places are in tokens.

    ``parent_call_id`` is the call that the request continues, and ``kept`` the length of its prompt and
    generation; ``added`` is what follows them. ``diverges_at`` is the first place where the template's own
    prompt differs from the kept tokens; None if it was not rendered or does not differ. ``reason`` is one
    of ``reasons.CONTINUITY_REASONS``, and empty unless the mode is plain.
    """

    policy: Policy
    mode: Mode
    reason: str = ""
    parent_call_id: str | None = None
    kept: int = 0
    added: int = 0
    diverges_at: int | None = None

    @property
    def outcome(self) -> str:
        """The reason of a plain prompt, else the mode: one word for lists."""
        return self.reason or self.mode.value


@dataclass(frozen=True, slots=True)
class Translation:
    """The dialect in which a client made a call that the engine answered as a chat completion.

    ``client_model`` is the model that the client named, and ``client_response_id`` the id of the response
    that it was shown. ``left_out`` names what of its request has no place in a chat completion. ``history`` says how
    far the client's history was put back as the policy wrote it, and ``restored`` how many messages that changed.
    """

    dialect: str
    client_model: str
    client_response_id: str
    left_out: tuple[str, ...] = ()
    history: str = "off"
    restored: int = 0


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """The assistant message of a stored call; ``order`` rises with each call that is stored."""

    order: int
    message: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class HistoryLink:
    """By what a later request is recognised as one that continues a call.

    ``chain`` is a hash of the conversation up to the call's answer. ``reasoning`` and ``call_ids`` are
    digests of the answer's reasoning and of the ids of its tool calls, empty where it has none. ``ended``
    says whether the policy ended its turn itself.
    """

    chain: bytes
    reasoning: bytes
    call_ids: bytes
    ended: bool


@dataclass(frozen=True, slots=True)
class KnownCall:
    """A stored call with its link. ``prompt_length`` is in tokens, and ``order`` rises with each call that is
    stored."""

    model_call_id: str
    link: HistoryLink
    prompt_length: int
    order: int
