"""Pages of rollouts, by what somebody looks for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import bindparam, select, text, union
from sqlalchemy.ext.asyncio import AsyncConnection

from token_id_capture.store.queries import RolloutSummary, latest_outcome, summaries
from token_id_capture.store.schema import (
    FORBIDS_TRAINING,
    build_outcomes,
    call_intents,
    entries,
    incomplete_flags,
    rollouts,
)

RolloutState = Literal["open", "frozen", "retired"]


@dataclass(frozen=True, slots=True)
class RolloutFilter:
    """What the rollouts of a page have in common; a field that is None or false lets all through.

    ``masked``: the latest verdict forbids training, be it masked or failed. ``incomplete``: a flag
    is set or a call is open. ``opened_since``: seconds since the epoch. ``model``: at least one call
    names it.
    """

    state: RolloutState | None = None
    masked: bool = False
    incomplete: bool = False
    opened_since: float | None = None
    model: str | None = None


EVERY_ROLLOUT = RolloutFilter()


async def list_rollouts(
    connection: AsyncConnection, after: str, limit: int, wanted: RolloutFilter = EVERY_ROLLOUT
) -> list[RolloutSummary]:
    """The next ``limit`` wanted rollouts whose id sorts behind ``after``."""
    page = (
        summaries()
        .where(rollouts.c.rollout_id > bindparam("after"), *_conditions(wanted))
        .order_by(rollouts.c.rollout_id)
        .limit(bindparam("page"))
    )
    rows = await connection.execute(page, {"after": after, "page": limit})
    return [RolloutSummary(*row) for row in rows]


def _conditions(wanted: RolloutFilter) -> Iterator[Any]:
    """Each is answered from an index, also where none of very many rollouts fulfils it."""
    if wanted.state is not None:
        yield rollouts.c.state == wanted.state
    if wanted.opened_since is not None:
        yield rollouts.c.opened_at >= wanted.opened_since
    if wanted.masked:
        # An index of such verdicts finds candidates; a later verdict may have taken one back.
        yield rollouts.c.rollout_id.in_(_behind(build_outcomes, text(FORBIDS_TRAINING)))
        yield latest_outcome(build_outcomes.c.outcome).in_(["masked", "failed"])
    if wanted.incomplete:
        is_open = call_intents.c.outcome.is_(None)
        yield rollouts.c.rollout_id.in_(union(_behind(incomplete_flags), _behind(call_intents, is_open)))
    if wanted.model is not None:
        of_model = select(entries.c.rollout_id).where(
            entries.c.rollout_id == rollouts.c.rollout_id, entries.c.model == wanted.model
        )
        yield of_model.correlate(rollouts).exists()


def _behind(table: Any, *conditions: Any) -> Any:
    return select(table.c.rollout_id).where(table.c.rollout_id > bindparam("after"), *conditions)
