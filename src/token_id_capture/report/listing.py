"""Rollouts as lines of a list. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from token_id_capture.report.model import RolloutLine
from token_id_capture.report.records import Told, group_of

if TYPE_CHECKING:
    from token_id_capture.store import RolloutSummary


def lines(found: Iterable[tuple[int, RolloutSummary]], told: Mapping[str, Told]) -> tuple[RolloutLine, ...]:
    """A line for each rollout; ``found`` has each with a number that grows with the time of its opening."""
    return tuple(line(number, summary, told.get(summary.rollout_id)) for number, summary in found)


def line(number: int, summary: RolloutSummary, told: Told | None) -> RolloutLine:
    """What a list says of one rollout."""
    return RolloutLine(
        number=number,
        id=summary.rollout_id,
        state=summary.state,
        outcome=summary.outcome,
        reason=summary.reason or "",
        causes=tuple(cause.rpartition(" ")[0] for cause in (summary.causes or "").split(", ") if cause),
        calls=summary.calls,
        generated_tokens=summary.generated_tokens,
        flags=summary.flags,
        open_calls=summary.open_intents,
        opened_at=summary.opened_at,
        reward=None if told is None else told.reward,
        group=(told.group if told is not None else None) or group_of(summary.rollout_id),
    )
