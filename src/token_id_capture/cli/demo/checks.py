"""The demo checks itself: every number that it prints is held against the policy or the harness."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from token_id_capture.builder import assert_prefix_contiguity
from token_id_capture.cli.demo.journey import Rollout
from token_id_capture.integrations.nemo_gym import MASK_SAMPLE_KEY
from token_id_capture.lifecycle import Outcome, State
from token_id_capture.store import RolloutDetail, TokenCaptureStore
from token_id_capture.testing.policy import Policy

TOLERANCE: Final = 1e-9


@dataclass
class CheckedRollout:
    """What became of one rollout. ``problems`` lists what is not as it must be."""

    rollout_id: str
    what: str
    calls: int
    outcome: str = ""
    reason: str = ""
    lost_calls: list[dict[str, Any]] = field(default_factory=list)
    delivered_tokens: int = 0
    largest_difference: float = 0.0
    """Between a delivered log probability and the policy's own."""
    problems: list[str] = field(default_factory=list)


async def check(rollouts: list[Rollout], database: Path, lines: list[bytes], policy: Policy) -> list[CheckedRollout]:
    """Hold the training rows (``lines`` of JSON) and the database against what the agents lived through."""
    rows = {row["_ng_rollout_id"]: row for row in map(json.loads, lines)}
    outcomes = []
    async with TokenCaptureStore(database, create=False) as store:
        for rollout in rollouts:
            story = rollout.story
            outcome = CheckedRollout(story.rollout_id, story.what, rollout.calls)
            outcomes.append(outcome)
            _check_outcome(outcome, rollout, await store.describe_rollout(story.rollout_id))
            row = rows.get(story.rollout_id)
            if row is None:
                outcome.problems.append("it has no training row")
            elif bool(row.get(MASK_SAMPLE_KEY)) != (outcome.outcome == Outcome.MASKED):
                outcome.problems.append(f"its row says {MASK_SAMPLE_KEY}={row.get(MASK_SAMPLE_KEY)}")
            elif outcome.outcome == Outcome.DELIVERED:
                _check_tokens(outcome, rollout, row["response"], policy)
    return outcomes


def _check_outcome(outcome: CheckedRollout, rollout: Rollout, detail: RolloutDetail) -> None:
    expected_reason = rollout.story.mask_reason
    outcome.outcome, outcome.reason = detail.summary.outcome or "", detail.summary.reason or ""
    outcome.lost_calls = [
        {"model_call_id": intent.model_call_id, "pid": intent.writer_pid, "host": intent.writer_host}
        for intent in detail.intents
        if intent.outcome is None
    ]
    expected = (
        (Outcome.DELIVERED, "", State.RETIRED)
        if expected_reason is None
        else (Outcome.MASKED, expected_reason, State.FROZEN)
    )
    found = (outcome.outcome, outcome.reason, detail.summary.state)
    if found != expected:
        outcome.problems.append(f"outcome, reason and state are {found}, expected {expected}")
    lost_by = [call["pid"] for call in outcome.lost_calls]
    killed = [] if rollout.killed_pid is None else [rollout.killed_pid]
    if lost_by != killed:
        outcome.problems.append(f"calls were lost by the processes {lost_by}, expected {killed}")


def _check_tokens(outcome: CheckedRollout, rollout: Rollout, response: dict[str, Any], policy: Policy) -> None:
    """Teacher forcing: the policy itself says the probability of each token of the rebuilt sequence."""
    try:
        assert_prefix_contiguity(response)
    except AssertionError as error:
        outcome.problems.append(str(error))
        return
    items = [item for item in response["output"] if "generation_token_ids" in item]
    if not items:
        outcome.problems.append("its row carries no tokens")
        return
    sequence = items[-1]["prompt_token_ids"] + items[-1]["generation_token_ids"]
    expected = policy.log_probs_of(sequence)
    for item in items:
        start, log_probs = len(item["prompt_token_ids"]), item["generation_log_probs"]
        own = expected[start : start + len(log_probs)]
        outcome.delivered_tokens += len(log_probs)
        differences = [abs(found - wanted) for found, wanted in zip(log_probs, own, strict=True)]
        outcome.largest_difference = max(outcome.largest_difference, *differences)
    if outcome.largest_difference > TOLERANCE:
        outcome.problems.append(f"a log probability differs from the policy's own by {outcome.largest_difference:.3g}")
    if outcome.delivered_tokens != rollout.kept_tokens:
        outcome.problems.append(
            f"{outcome.delivered_tokens} tokens were delivered, but the agent went on from {rollout.kept_tokens}"
        )
