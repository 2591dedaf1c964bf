"""Rows of one rollout: its trajectory, or each of its calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from token_id_capture.builder import project_chain_trajectory, run_builder
from token_id_capture.builder.rows import details, lineage
from token_id_capture.lifecycle import Outcome
from token_id_capture.rebuild import Build

if TYPE_CHECKING:
    from token_id_capture.store.read.evidence import Evidence

Row = dict[str, Any]


def why_masked(evidence: Evidence, build: Build) -> str | None:
    """Why the trajectory must not be trained on; None if nothing forbids it.

    A recorded outcome of a consumer stands, also where a build of today finds no fault.
    """
    if not build.deliverable:
        return build.reason
    latest = evidence.outcomes[-1] if evidence.outcomes else None
    if latest is not None and latest.outcome in (Outcome.MASKED, Outcome.FAILED):
        return latest.reason or latest.outcome
    return None


def trajectory_rows(evidence: Evidence, build: Build) -> Iterator[Row]:
    """A row for each sequence that may be trained on; see ``columns.TRAJECTORY_COLUMNS``."""
    yield from sequence_rows(_rollout(evidence), build)


def sequence_rows(rollout: Row, build: Build) -> Iterator[Row]:
    """The same, with the columns ``rollout`` of the rollout in each."""
    for index, sequence in enumerate(build.rows):
        if sequence.reasons:
            continue
        calls, trajectory = sequence.calls, sequence.trajectory()
        loss_mask = bytes(trajectory.loss_mask)
        yield {
            **rollout,
            **lineage(sequence, index, len(build.rows)),
            "calls": len(calls),
            "model": calls[-1].model,
            **details(sequence),
            "created_at": calls[-1].created_at,
            "sampled_tokens": loss_mask.count(1),
            "token_ids": trajectory.token_ids,
            "loss_mask": loss_mask,
            "log_probs": trajectory.log_probs,
        }


def call_rows(evidence: Evidence) -> Iterator[Row]:
    """A row for each call that generated something; see ``columns.CALL_COLUMNS``.

    Raises:
        ConflictingEntryError: one call id came with two different payloads.
    """
    for chain in run_builder(evidence.snapshot.entries, "per_request").chains:
        entry, trajectory = chain.links[0].entry, project_chain_trajectory(chain)
        yield {
            **_rollout(evidence),
            "incomplete": evidence.snapshot.incomplete,
            "model_call_id": entry.model_call_id,
            "model": entry.model,
            "weight_version": entry.weight_version,
            "finish_reason": entry.finish_reason,
            "continuity": None if entry.continuity is None else entry.continuity.outcome,
            "created_at": entry.created_at,
            "prompt_length": len(entry.prompt_token_ids),
            "generation_length": len(entry.generation_token_ids),
            "token_ids": trajectory.token_ids,
            "loss_mask": bytes(trajectory.loss_mask),
            "log_probs": trajectory.log_probs,
        }


def _rollout(evidence: Evidence) -> Row:
    return {
        "rollout_id": evidence.rollout_id,
        "snapshot_id": evidence.snapshot.snapshot_id or None,
        "version": evidence.snapshot.version,
        "state": evidence.state,
        "outcome": evidence.outcomes[-1].outcome if evidence.outcomes else None,
    }
