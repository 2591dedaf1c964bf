"""All rollouts of a database as a page shows them. Pure: from counts that ``store.read.history`` read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from token_id_capture.builder.masks import SPLIT_BY_CAUSE
from token_id_capture.explanation.remedies import SENTENCES
from token_id_capture.explanation.wording import counted
from token_id_capture.lifecycle import Outcome, State
from token_id_capture.report.charts import Slots, binned, doubling_bins, even_bins, short_number
from token_id_capture.report.model import (
    OverviewData,
    Plot,
    ReasonBar,
    Series,
    Tile,
)
from token_id_capture.report.records import Told

if TYPE_CHECKING:
    from token_id_capture.store.read.history import BuiltRollout, CauseCount, FlagCount, KeptEvidence, OutcomeCount

OUTCOMES: Final = (Outcome.DELIVERED, Outcome.MASKED, Outcome.FAILED)
_SHOWN_CAUSES: Final = 6
_REWARD_BINS: Final = 10


@dataclass(frozen=True, slots=True)
class History:
    """What was read of a database; ``slots`` is None if no outcome was recorded yet."""

    database: str
    made_at: float
    slots: Slots | None
    outcomes: Sequence[OutcomeCount]
    states: Mapping[str, int]
    flags: Sequence[FlagCount]
    open_calls: int
    causes: Sequence[CauseCount]
    causes_in_time: Sequence[tuple[int, str, int]]
    built: Sequence[BuiltRollout]
    weight_versions: Sequence[int]
    kept: Sequence[KeptEvidence]
    more_kept: bool
    told: Mapping[str, Told] = field(default_factory=dict)


def overview_data(history: History) -> OverviewData:
    """Decide what is shown."""
    return OverviewData(
        summary=_summary(history),
        tiles=tuple(_tiles(history)),
        plots=tuple(_plots(history)),
        reasons=tuple(_reasons(history)),
        flags=tuple(_flags(history)),
        kept=tuple(history.kept),
        more_kept=history.more_kept,
        made_at=history.made_at,
    )


def _plots(history: History) -> Iterator[Plot]:
    if history.slots is not None:
        yield from _over_time(history, history.slots)
    yield from _distributions(history)


def _over_time(history: History, slots: Slots) -> Iterator[Plot]:
    labels = tuple(map(slots.label, range(slots.number)))

    def series(name: str, counts: Mapping[int, int]) -> Series:
        return Series(name, tuple(counts.get(slot, 0) for slot in range(slots.number)))

    rollouts: dict[str, Counter[int]] = {outcome: Counter() for outcome in OUTCOMES}
    captured, delivered = Counter[int](), Counter[int]()
    for count in history.outcomes:
        rollouts[count.outcome][count.slot] += count.rollouts
        captured[count.slot] += count.captured
        if count.outcome == Outcome.DELIVERED:
            # A masked build counts what its main sequence holds, but nobody got it.
            delivered[count.slot] += count.delivered
    yield Plot("Rollouts by outcome", "rollouts", labels, tuple(series(*one) for one in rollouts.items()), time=True)
    causes: dict[str, Counter[int]] = {}
    for slot, cause, number in history.causes_in_time:
        causes.setdefault(cause, Counter())[slot] += number
    if causes:
        most = sorted(causes.items(), key=lambda one: -one[1].total())[:_SHOWN_CAUSES]
        title = "Why sequences began anew"
        yield Plot(title, "beginnings", labels, tuple(series(*one) for one in most), time=True)
    rest = {slot: max(0, captured[slot] - delivered[slot]) for slot in captured}
    both = series("delivered", delivered), series("captured, not delivered", rest)
    yield Plot("Yield of sampled tokens", "tokens", labels, both, time=True)


def _distributions(history: History) -> Iterator[Plot]:
    calls = {
        outcome: [one.calls for one in history.built if one.outcome == outcome and one.calls is not None]
        for outcome in OUTCOMES
    }
    yield from _doubling("Calls of a rollout", "rollouts", calls)
    tokens = {
        outcome: [
            one.generated_tokens for one in history.built if one.outcome == outcome and one.generated_tokens is not None
        ]
        for outcome in OUTCOMES
    }
    yield from _doubling("Sampled tokens of a rollout", "rollouts", tokens)
    if history.weight_versions:
        most = max(history.weight_versions)
        counts = Counter(history.weight_versions)
        values = tuple(counts[number] for number in range(1, most + 1))
        labels = tuple(map(str, range(most)))
        title = "Staleness: updates of the weights during a rollout"
        yield Plot(title, "rollouts", labels, (Series("rollouts", values),))
    yield from _rewards(history)


def _doubling(title: str, unit: str, values: Mapping[Outcome, Sequence[int]]) -> Iterator[Plot]:
    most = max((max(one) for one in values.values() if one), default=None)
    if most is None:
        return
    bins = doubling_bins(most)
    labels = tuple(short_number(start) if start < 2 else f"{short_number(start)}–{_end(start)}" for start in bins)  # noqa: RUF001
    yield Plot(title, unit, labels, tuple(Series(name, binned(one, bins)) for name, one in values.items()))


def _end(start: int) -> str:
    """The end of a bin that is as wide as its start is large; large ones in round numbers."""
    return short_number(2 * start - 1 if start < 512 else 2 * start)


def _rewards(history: History) -> Iterator[Plot]:
    """Rewards by what became of the rollouts, where their finished records were given."""
    outcome_of = {one.rollout_id: one.outcome for one in history.built}
    rewards: dict[str, list[float]] = {}
    for rollout_id, told in history.told.items():
        if told.reward is not None:
            rewards.setdefault(outcome_of.get(rollout_id, "no outcome"), []).append(told.reward)
    if not rewards:
        return
    everyone = [reward for one in rewards.values() for reward in one]
    bins = even_bins(min(everyone), max(everyone), _REWARD_BINS)[:-1]
    names = [name for name in (*OUTCOMES, "no outcome") if name in rewards]
    means = ", ".join(f"{name} {sum(rewards[name]) / len(rewards[name]):.3g}" for name in names)
    series = tuple(Series(name, binned(rewards[name], bins)) for name in names)
    yield Plot("Reward by outcome", "rollouts", tuple(f"{start:g}" for start in bins), series, note=f"Mean: {means}")


def _totals(history: History) -> tuple[Counter[str], int, int]:
    """Rollouts by outcome, sampled tokens captured, and of them delivered."""
    rollouts = Counter[str]()
    for count in history.outcomes:
        rollouts[count.outcome] += count.rollouts
    captured = sum(count.captured for count in history.outcomes)
    return rollouts, captured, sum(one.delivered for one in history.outcomes if one.outcome == Outcome.DELIVERED)


def _tiles(history: History) -> Iterator[Tile]:
    rollouts, captured, delivered = _totals(history)
    forbidden = rollouts[Outcome.MASKED] + rollouts[Outcome.FAILED]
    judged = rollouts[Outcome.DELIVERED] + forbidden
    noun = "rollout" if rollouts[Outcome.DELIVERED] == 1 else "rollouts"
    yield Tile(f"{rollouts[Outcome.DELIVERED]:,}", f"{noun} delivered", _percent(rollouts[Outcome.DELIVERED], judged))
    yield Tile(f"{forbidden:,}", "masked or failed", _percent(forbidden, judged))
    under_way = f"{counted(history.open_calls, 'call')} under way or lost"
    yield Tile(f"{history.states.get(State.OPEN, 0):,}", "open now", under_way)
    yield Tile(short_number(delivered), "sampled tokens delivered", f"of {short_number(captured)} captured")
    yield Tile(f"{100 * delivered / captured:.1f} %" if captured else "–", "token yield", "delivered of captured")  # noqa: RUF001
    rewards = [told.reward for told in history.told.values() if told.reward is not None]
    if rewards:
        yield Tile(f"{sum(rewards) / len(rewards):.3g}", "mean reward", f"of {counted(len(rewards), 'record')}")


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} % of those with an outcome" if whole else "no outcome yet"


def _summary(history: History) -> str:
    states = ", ".join(f"{history.states.get(state, 0):,} {state}" for state in State)
    total = sum(history.states.values())
    text = f"{counted(total, 'rollout is', 'rollouts are')} known to this database: {states}."
    if history.slots is None:
        return f"{text} No outcome was recorded yet."
    rollouts, _, _ = _totals(history)
    forbidden = rollouts[Outcome.MASKED] + rollouts[Outcome.FAILED]
    text += f" {counted(rollouts[Outcome.DELIVERED], 'was', 'were')} delivered and {forbidden:,} masked or failed"
    reasons = _reason_counts(history)
    if not reasons:
        return f"{text}."
    reason, count = reasons.most_common(1)[0]
    return f"{text}, most often for {reason} ({count:,})."


def _reason_counts(history: History) -> Counter[str]:
    found: Counter[str] = Counter()
    for count in history.outcomes:
        if count.outcome != Outcome.DELIVERED:
            found[count.reason or "no reason recorded"] += count.rollouts
    return found


def _reasons(history: History) -> Iterator[ReasonBar]:
    for reason, count in _reason_counts(history).most_common():
        yield ReasonBar(reason, SENTENCES.get(reason, ""), count, _causes(history, reason))


def _causes(history: History, reason: str) -> str:
    """Why sequences began anew in the rollouts that were masked for that."""
    if reason not in SPLIT_BY_CAUSE:
        return ""
    return ", ".join(f"{one.cause} {one.beginnings:,}" for one in history.causes if one.reason == reason)


def _flags(history: History) -> Iterator[ReasonBar]:
    for flag in history.flags:
        note = f"in {counted(flag.rollouts, 'rollout')}"
        yield ReasonBar(flag.reason, SENTENCES.get(flag.reason, ""), flag.flags, note)
