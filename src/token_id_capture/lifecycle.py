"""The life of a rollout: its states, its outcomes, and the rows that tell why. The standard library alone.

Times are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final


class State(StrEnum):
    """How far a rollout has come; the words of ``rollouts.state``."""

    OPEN = "open"
    FROZEN = "frozen"
    RETIRED = "retired"


class Outcome(StrEnum):
    """What became of a snapshot; the words of ``build_outcomes.outcome``, except deliverable."""

    DELIVERABLE = "deliverable"
    """Nothing forbids training on it, and it is not delivered yet. Never recorded."""
    DELIVERED = "delivered"
    MASKED = "masked"
    """A rule forbids training on it."""
    FAILED = "failed"
    """It could not be frozen or built."""
    RELEASED = "released"
    """An administrator gave its evidence up."""

    @property
    def keeps_evidence(self) -> bool:
        """Whether the snapshot stays until an administrator releases it."""
        return self in (Outcome.MASKED, Outcome.FAILED)


class Sequences(StrEnum):
    """Which sequences of a rollout are delivered."""

    MAIN = "main"
    """The one of the main agent: a row a rollout."""
    ALL = "all"
    """Every one, sub-agents and earlier segments included, each sampled token in exactly one row."""


class IntentOutcome(StrEnum):
    """How a call ended of which no entry is stored; the words of ``call_intents.outcome``."""

    REFUSED = "refused"
    """The engine refused it before it generated anything."""


class Purpose(StrEnum):
    """What a harness makes a call for."""

    TURN = "turn"
    """A turn of an agent's conversation."""
    AUXILIARY = "auxiliary"
    """Something beside the conversation, such as its title."""
    COMPACTION = "compaction"
    """A summary with which the agent's conversation starts again."""
    PREWARM = "prewarm"
    """A call that only fills the engine's cache."""


MAIN_AGENT: Final = "main"


@dataclass(frozen=True, slots=True)
class CallOrigin:
    """Whose call it is, as far as the harness tells; each member is None where it does not.

    ``agent`` is ``MAIN_AGENT`` or the harness's id of a sub-agent, whose parent is ``parent_agent``.
    ``offers_tools`` says whether the request offered any: title and summary calls mostly offer none.
    ``session_headers`` are those of the request that the gateway is set to keep, by their names in lower case.
    """

    agent: str | None = None
    parent_agent: str | None = None
    purpose: Purpose | None = None
    offers_tools: bool | None = None
    session_headers: Mapping[str, str] | None = field(default=None, hash=False)


UNTOLD: Final = CallOrigin()
"""The origin of a call of which nothing is known."""

ORIGIN_FIELDS: Final = ("agent", "parent_agent", "purpose", "offers_tools")
"""The members of ``CallOrigin`` that are columns and members of records too."""

CALL_FIELDS: Final = (*ORIGIN_FIELDS, "session_headers")
"""All members of ``CallOrigin``: columns of intents and flags. A record has its headers among its extras."""


@dataclass(frozen=True, slots=True)
class Flag:
    """Why a rollout is incomplete; ``model_call_id`` is empty if it concerns no single call."""

    model_call_id: str
    reason: str
    detail: str
    flagged_at: float = 0.0
    origin: CallOrigin = UNTOLD


@dataclass(frozen=True, slots=True)
class Intent:
    """A call that was begun and of which no entry is stored; ``outcome`` None means still open."""

    model_call_id: str
    outcome: IntentOutcome | None
    detail: str
    begun_at: float
    writer_pid: int
    writer_host: str
    origin: CallOrigin = UNTOLD


@dataclass(frozen=True, slots=True)
class BuildOutcome:
    """What a consumer, or an administrator, recorded of one version of a snapshot."""

    version: int
    outcome: Outcome
    reason: str
    metrics: Mapping[str, Any] = field(default_factory=dict)
    recorded_at: float = 0.0

    @property
    def all_reasons(self) -> tuple[str, ...]:
        """Every reason with its particulars, as in a build; empty if none but ``reason`` is known."""
        return tuple(self.metrics.get("reasons", ()))


@dataclass(frozen=True, slots=True)
class LateWrite:
    """A record that was refused because it came too late; ``state`` is what refused it."""

    model_call_id: str
    state: State
    attempted_at: float
