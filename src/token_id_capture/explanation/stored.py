"""The input of an explanation: one rollout as it is stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from token_id_capture.lifecycle import BuildOutcome, Flag, Intent, IntentOutcome, State
from token_id_capture.protocols import TokenCaptureSnapshot

if TYPE_CHECKING:
    from token_id_capture.store.read.evidence import Evidence


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


def stored_rollout(evidence: Evidence) -> StoredRollout:
    """A rollout as it was read of a database."""
    return StoredRollout(
        rollout_id=evidence.rollout_id,
        state=evidence.state,
        snapshot=evidence.snapshot,
        flags=evidence.flags,
        open_calls=[OpenCall(one.model_call_id, _process(one)) for one in evidence.intents if one.outcome is None],
        refused_calls=[one.model_call_id for one in evidence.intents if one.outcome is IntentOutcome.REFUSED],
        late_calls=[late.model_call_id for late in evidence.late_writes],
        recorded=evidence.outcomes,
    )


def _process(intent: Intent) -> str:
    begun = datetime.fromtimestamp(intent.begun_at).astimezone().isoformat(sep=" ", timespec="seconds")
    return f"process {intent.writer_pid} on {intent.writer_host} at {begun}"
