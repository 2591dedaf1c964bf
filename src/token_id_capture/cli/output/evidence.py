"""One rollout as it is stored, for ``tokcap show`` and ``tokcap explain``: read, never frozen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from token_id_capture.cli.options import fail, local_time
from token_id_capture.cli.output.database import database_file
from token_id_capture.lifecycle import IntentOutcome

if TYPE_CHECKING:
    from token_id_capture.explanation import StoredRollout
    from token_id_capture.store.read.evidence import Evidence


def rollout_argument(rollout_id: str) -> str:
    """A rollout id from the command line; ends the command if it is none."""
    from token_id_capture.records import validate_rollout_id

    try:
        return validate_rollout_id(rollout_id)
    except ValueError as error:
        fail(str(error))


def stored_evidence(database: str, rollout_id: str) -> Evidence:
    """Read one state of the rollout.

    Raises:
        UnknownRolloutError: there is no row of it.
        CorruptCaptureError: a call is damaged.
    """
    from token_id_capture.store.file.read_only import read_only
    from token_id_capture.store.read.evidence import read_evidence

    with read_only(database_file(database)) as connection:
        return read_evidence(connection, rollout_id)


def stored_rollout(evidence: Evidence) -> StoredRollout:
    """The same, as the explanation takes it."""
    from token_id_capture.explanation import OpenCall, StoredRollout

    return StoredRollout(
        rollout_id=evidence.rollout_id,
        state=evidence.state,
        snapshot=evidence.snapshot,
        flags=evidence.flags,
        open_calls=[
            OpenCall(
                intent.model_call_id,
                f"process {intent.writer_pid} on {intent.writer_host} at {local_time(intent.begun_at)}",
            )
            for intent in evidence.intents
            if intent.outcome is None
        ],
        refused_calls=[intent.model_call_id for intent in evidence.intents if intent.outcome is IntentOutcome.REFUSED],
        late_calls=[late.model_call_id for late in evidence.late_writes],
        recorded=evidence.outcomes,
    )
