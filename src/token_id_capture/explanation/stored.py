"""What the explanation is made from: a rollout as it is stored, whoever reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from token_id_capture.lifecycle import BuildOutcome, Flag, State
from token_id_capture.protocols import TokenCaptureSnapshot


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A call that was begun and never ended, and the process that began it, in words."""

    model_call_id: str
    process: str


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """What is known of a rollout. ``snapshot`` is what a freeze would give now."""

    rollout_id: str
    state: State
    snapshot: TokenCaptureSnapshot
    flags: Sequence[Flag] = ()
    open_calls: Sequence[OpenCall] = ()
    refused_calls: Sequence[str] = ()
    late_calls: Sequence[str] = ()
    recorded: Sequence[BuildOutcome] = ()
