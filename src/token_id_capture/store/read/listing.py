"""Pages of rollouts, by what somebody looks for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from token_id_capture.lifecycle import State
from token_id_capture.store.driver import Execute
from token_id_capture.store.outcome_order import FORBIDDING, FORBIDS_TRAINING
from token_id_capture.store.read.queries import SUMMARIES, rollout_summary
from token_id_capture.store.read.summaries import RolloutSummary


@dataclass(frozen=True, slots=True)
class RolloutFilter:
    """What the rollouts of a page have in common; a field that is None or false lets all through.

    ``masked``: the latest outcome forbids training, be it masked or failed. ``incomplete``: a flag
    is set or a call is open. ``opened_since``: seconds since the epoch. ``model``: at least one call
    names it.
    """

    state: State | None = None
    masked: bool = False
    incomplete: bool = False
    opened_since: float | None = None
    model: str | None = None


EVERY_ROLLOUT = RolloutFilter()


def list_rollouts(
    execute: Execute, after: str, limit: int, wanted: RolloutFilter = EVERY_ROLLOUT
) -> list[RolloutSummary]:
    """The next ``limit`` wanted rollouts whose id sorts behind ``after``."""
    conditions = " AND ".join(["r.rollout_id > :after", *_conditions(wanted)])
    parameters = {
        "after": after,
        "limit": limit,
        "state": wanted.state,
        "since": wanted.opened_since,
        "model": wanted.model,
    }
    page = execute(f"{SUMMARIES} WHERE {conditions} ORDER BY r.rollout_id LIMIT :limit", parameters)
    return [rollout_summary(row) for row in page.fetchall()]


def _conditions(wanted: RolloutFilter) -> Iterator[str]:
    """Each is answered from an index, also where none of very many rollouts fulfils it."""
    if wanted.state is not None:
        yield "r.state = :state"
    if wanted.opened_since is not None:
        yield "r.opened_at >= :since"
    if wanted.masked:
        # An index of such outcomes finds candidates; a later outcome may have taken one back.
        judged = f"SELECT rollout_id FROM build_outcomes WHERE rollout_id > :after AND {FORBIDS_TRAINING}"
        yield f"r.rollout_id IN ({judged})"
        yield f"o.latest_outcome IN ({FORBIDDING})"
    if wanted.incomplete:
        yield (
            "r.rollout_id IN (SELECT rollout_id FROM incomplete_flags WHERE rollout_id > :after "
            "UNION SELECT rollout_id FROM call_intents WHERE rollout_id > :after AND outcome IS NULL)"
        )
    if wanted.model is not None:
        yield "EXISTS (SELECT 1 FROM entries AS e WHERE e.rollout_id = r.rollout_id AND e.model = :model)"
