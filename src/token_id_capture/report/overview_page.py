"""What the page of all rollouts shows. Pure: from counts that ``store.history`` read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from token_id_capture.builder.masks import SPLIT_BY_CAUSE
from token_id_capture.explanation.remedies import SENTENCES
from token_id_capture.explanation.wording import counted
from token_id_capture.lifecycle import Outcome, State
from token_id_capture.report.charts import BarChart, Slots, draw_bars, short_number

if TYPE_CHECKING:
    from token_id_capture.store.read.history import CauseCount, FlagCount, KeptEvidence, OutcomeCount

OUTCOMES: Final = (Outcome.DELIVERED, Outcome.MASKED, Outcome.FAILED)


@dataclass(frozen=True, slots=True)
class History:
    """What was read of a database; ``slots`` is None if no outcome was recorded yet."""

    database: str
    made_at: float
    slots: Slots | None
    outcomes: Sequence[OutcomeCount]
    states: dict[str, int]
    flags: Sequence[FlagCount]
    open_calls: int
    causes: Sequence[CauseCount]
    kept: Sequence[KeptEvidence]
    more_kept: bool


@dataclass(frozen=True, slots=True)
class Tile:
    """A number that matters, and what it is."""

    value: str
    label: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class ReasonBar:
    """How often a reason occurred; ``width`` in percent of the most frequent one."""

    reason: str
    what: str
    count: int
    width: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class SlotRow:
    """One slot of time in the table; ``fraction`` is delivered tokens of captured ones, None without any."""

    label: str
    delivered: int
    masked: int
    failed: int
    captured_tokens: int
    delivered_tokens: int
    fraction: float | None


@dataclass(frozen=True, slots=True)
class OverviewPage:
    """All that the template ``overview.html`` needs."""

    history: History
    summary: str
    tiles: tuple[Tile, ...]
    rows: tuple[SlotRow, ...]
    rollouts: BarChart | None
    tokens: BarChart | None
    reasons: tuple[ReasonBar, ...]
    flags: tuple[ReasonBar, ...]


def overview_page(history: History) -> OverviewPage:
    """Decide what is shown."""
    rows = tuple(_rows(history))
    return OverviewPage(
        history=history,
        summary=_summary(history, rows),
        tiles=tuple(_tiles(history, rows)),
        rows=rows,
        rollouts=_rollout_chart(history.slots, rows),
        tokens=_token_chart(history.slots, rows),
        reasons=_reason_bars(history),
        flags=_flag_bars(history),
    )


def _rows(history: History) -> Iterator[SlotRow]:
    if history.slots is None:
        return
    for slot in range(history.slots.number):
        here = [count for count in history.outcomes if count.slot == slot]
        rollouts = {name: sum(count.rollouts for count in here if count.outcome == name) for name in OUTCOMES}
        captured = sum(count.captured for count in here)
        # A masked build counts what its main sequence holds, but nobody got it.
        delivered = sum(count.delivered for count in here if count.outcome == Outcome.DELIVERED)
        yield SlotRow(
            label=history.slots.label(slot),
            **rollouts,
            captured_tokens=captured,
            delivered_tokens=delivered,
            fraction=delivered / captured if captured else None,
        )


def _tiles(history: History, rows: Sequence[SlotRow]) -> Iterator[Tile]:
    delivered, masked = sum(row.delivered for row in rows), sum(row.masked + row.failed for row in rows)
    captured, handed_on = sum(row.captured_tokens for row in rows), sum(row.delivered_tokens for row in rows)
    judged = delivered + masked
    noun = "rollout" if delivered == 1 else "rollouts"
    under_way = f"{counted(history.open_calls, 'call')} under way or lost"
    yield Tile(f"{delivered:,}", f"{noun} delivered", _percent(delivered, judged))
    yield Tile(f"{masked:,}", "masked or failed", _percent(masked, judged))
    yield Tile(f"{history.states.get(State.OPEN, 0):,}", "open now", under_way)
    yield Tile(short_number(handed_on), "sampled tokens delivered", f"of {short_number(captured)} captured")
    yield Tile(f"{100 * handed_on / captured:.1f} %" if captured else "-", "token yield", "delivered of captured")


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} % of those with an outcome" if whole else "no outcome yet"


def _summary(history: History, rows: Sequence[SlotRow]) -> str:
    states = ", ".join(f"{history.states.get(state, 0):,} {state}" for state in State)
    total = sum(history.states.values())
    text = f"{counted(total, 'rollout is', 'rollouts are')} known to this database: {states}."
    if history.slots is None:
        return f"{text} No outcome was recorded yet."
    delivered, masked = sum(row.delivered for row in rows), sum(row.masked + row.failed for row in rows)
    text += f" {counted(delivered, 'was', 'were')} delivered and {masked:,} masked or failed"
    reasons = _reason_counts(history)
    if not reasons:
        return f"{text}."
    reason, count = reasons.most_common(1)[0]
    return f"{text}, most often for {reason} ({count:,})."


def _rollout_chart(slots: Slots | None, rows: Sequence[SlotRow]) -> BarChart | None:
    if slots is None:
        return None
    values = [{"delivered": row.delivered, "masked": row.masked, "failed": row.failed} for row in rows]
    titles = (f"{row.delivered:,} delivered, {row.masked:,} masked, {row.failed:,} failed" for row in rows)
    return draw_bars(slots, values, titles)


def _token_chart(slots: Slots | None, rows: Sequence[SlotRow]) -> BarChart | None:
    if slots is None:
        return None
    values = [
        {"delivered": row.delivered_tokens, "rest": max(0, row.captured_tokens - row.delivered_tokens)} for row in rows
    ]
    titles = (
        f"{row.label}: {row.delivered_tokens:,} of {row.captured_tokens:,} sampled tokens delivered" for row in rows
    )
    return draw_bars(slots, values, titles)


def _reason_counts(history: History) -> Counter[str]:
    found: Counter[str] = Counter()
    for count in history.outcomes:
        if count.outcome != Outcome.DELIVERED:
            found[count.reason or "no reason recorded"] += count.rollouts
    return found


def _reason_bars(history: History) -> tuple[ReasonBar, ...]:
    counts = _reason_counts(history)
    most = max(counts.values(), default=1)
    return tuple(
        ReasonBar(reason, SENTENCES.get(reason, ""), count, round(100 * count / most, 2), _causes(history, reason))
        for reason, count in counts.most_common()
    )


def _causes(history: History, reason: str) -> str:
    """Why sequences began anew in the rollouts that were masked for that."""
    if reason not in SPLIT_BY_CAUSE:
        return ""
    return ", ".join(f"{one.cause} {one.beginnings:,}" for one in history.causes if one.reason == reason)


def _flag_bars(history: History) -> tuple[ReasonBar, ...]:
    most = max((flag.flags for flag in history.flags), default=1)
    return tuple(
        ReasonBar(
            flag.reason,
            SENTENCES.get(flag.reason, ""),
            flag.flags,
            round(100 * flag.flags / most, 2),
            f"in {counted(flag.rollouts, 'rollout')}",
        )
        for flag in history.flags
    )
