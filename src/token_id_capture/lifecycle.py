"""The life of a rollout: its states, its outcomes, and the rows that tell why. The standard library alone.

Times are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


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


class IntentOutcome(StrEnum):
    """How a call ended of which no entry is stored; the words of ``call_intents.outcome``."""

    REFUSED = "refused"
    """The engine refused it before it generated anything."""


@dataclass(frozen=True, slots=True)
class Flag:
    """Why a rollout is incomplete; ``model_call_id`` is empty if it concerns no single call."""

    model_call_id: str
    reason: str
    detail: str
    flagged_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Intent:
    """A call that was begun and of which no entry is stored; ``outcome`` None means still open."""

    model_call_id: str
    outcome: IntentOutcome | None
    detail: str
    begun_at: float
    writer_pid: int
    writer_host: str


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
