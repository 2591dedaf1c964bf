"""What happened when, in lanes of one time axis. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from token_id_capture.explanation.wording import counted

if TYPE_CHECKING:
    from token_id_capture.explanation.call_tree import CallTree
    from token_id_capture.store.read.evidence import Evidence

_TICKS: Final = 5


@dataclass(frozen=True, slots=True)
class Event:
    """Something at ``at`` (seconds since the epoch); ``kind`` names a style."""

    at: float
    kind: str
    title: str


@dataclass(frozen=True, slots=True)
class Mark:
    """An event at ``x`` percent of the axis."""

    x: float
    kind: str
    title: str


@dataclass(frozen=True, slots=True)
class Lane:
    """Events of one kind."""

    name: str
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """``ticks`` are labels at equal distances from the first event to the last; ``date`` is that of the first."""

    lanes: tuple[Lane, ...]
    ticks: tuple[str, ...]
    date: str


def draw_timeline(evidence: Evidence, tree: CallTree | None) -> Timeline:
    """Lay out all that has a time; calls whose time nobody recorded are left out."""
    lanes = [(name, list(events)) for name, events in _events(evidence, tree)]
    times = [event.at for _, events in lanes for event in events]
    start, end = min(times), max(times)
    length = end - start

    def place(event: Event) -> Mark:
        x = 100 * (event.at - start) / length if length else 50.0
        return Mark(round(x, 3), event.kind, event.title)

    drawn = tuple(Lane(name, tuple(map(place, events))) for name, events in lanes if events)
    steps = range(_TICKS) if length else range(1)
    ticks = tuple(_clock(start + length * step / (_TICKS - 1), length) for step in steps)
    return Timeline(drawn, ticks, f"{_utc(start):%Y-%m-%d}")


def _events(evidence: Evidence, tree: CallTree | None) -> Iterable[tuple[str, Iterable[Event]]]:
    yield (
        "calls recorded",
        (
            Event(
                call.entry.created_at,
                call.role.value,
                f"Call {call.number}, {counted(len(call.entry.generation_token_ids), 'token')} sampled",
            )
            for call in (tree.calls if tree is not None else ())
            if call.entry.created_at > 0
        ),
    )
    yield (
        "calls without tokens",
        (
            Event(
                intent.begun_at,
                intent.outcome or "lost",
                f"Call {intent.model_call_id} begun, {intent.outcome or 'never ended'}",
            )
            for intent in evidence.intents
        ),
    )
    yield (
        "flags",
        (Event(flag.flagged_at, "flag", f"{flag.reason} {flag.detail}".strip()) for flag in evidence.flags),
    )
    states = (("opened", evidence.opened_at), ("frozen", evidence.frozen_at), ("retired", evidence.retired_at))
    yield "rollout", (Event(at, "state", f"Rollout {name}") for name, at in states if at is not None)
    yield (
        "outcomes",
        (
            Event(outcome.recorded_at, outcome.outcome, f"{outcome.outcome} {outcome.reason}".strip())
            for outcome in evidence.outcomes
        ),
    )
    yield (
        "late writes",
        (Event(late.attempted_at, "late", f"Call {late.model_call_id} came too late") for late in evidence.late_writes),
    )


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _clock(seconds: float, length: float) -> str:
    """As precise as the length of the axis asks for."""
    if length >= 3 * 86_400:
        return f"{_utc(seconds):%m-%d %H:%M}"
    if length >= 30:
        return f"{_utc(seconds):%H:%M:%S}"
    return f"{_utc(seconds):%H:%M:%S.%f}"[:-3]
