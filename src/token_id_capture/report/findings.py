"""The findings of an explanation in the form in which the page shows them. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from token_id_capture.explanation import CallTree, Decode, Departure, Explanation, Finding, PlacedCall, Suspicion
from token_id_capture.explanation.causes import REMEDIES
from token_id_capture.tokens import TokenIds

_SHOWN_CALLS: Final = 24


@dataclass(frozen=True, slots=True)
class Concern:
    """A call with its particulars, or only particulars.

    ``number`` is its place in the page's table, None if no tokens of it are stored.
    """

    call_id: str
    number: int | None
    particulars: str


@dataclass(frozen=True, slots=True)
class Side:
    """What one call has around the first difference; ``at`` is None where the prompt ends."""

    number: int
    before: tuple[int, ...]
    at: int | None
    after: tuple[int, ...]
    text: str | None


@dataclass(frozen=True, slots=True)
class ShownDeparture:
    """Where a prompt departs from an earlier call, and what that looks like."""

    what: str
    where: str
    cut: bool
    sides: tuple[Side, Side]
    cause: str
    remedy: str


@dataclass(frozen=True, slots=True)
class ShownFinding:
    """One reason, and all that is known about it."""

    reason: str
    what: str
    remedy: str
    concerns: tuple[Concern, ...]
    more_concerns: int
    departures: tuple[ShownDeparture, ...]
    more_departures: int


def shown_findings(explained: Explanation, decode: Decode | None) -> Iterator[ShownFinding]:
    """All findings, in the order of the explanation."""
    for finding in explained.findings:
        yield ShownFinding(
            reason=finding.reason,
            what=finding.what,
            remedy=finding.remedy,
            concerns=() if finding.departures else tuple(_concerns(finding, explained.tree)),
            more_concerns=0 if finding.departures else max(0, len(finding.calls) - _SHOWN_CALLS),
            departures=tuple(_departure(*pair, decode) for pair in finding.departures),
            more_departures=finding.more_departures,
        )


def _concerns(finding: Finding, tree: CallTree | None) -> Iterator[Concern]:
    numbers = {call.entry.model_call_id: call.number for call in tree.calls} if tree is not None else {}
    for call_id, particulars in finding.calls[:_SHOWN_CALLS]:
        yield Concern(call_id, numbers.get(call_id), particulars)


def _departure(departure: Departure, suspicion: Suspicion, decode: Decode | None) -> ShownDeparture:
    call, earlier = departure.call, departure.earlier
    if departure.continues is None:
        what = f"Call {call.number} continues no earlier call. The closest is call {earlier.number}."
    else:
        what = f"Call {call.number} continues call {departure.continues.number}, but not call {earlier.number}."
    if departure.sampled_by is None:
        place = "in its prompt"
    elif departure.sampled_by is earlier:
        place = "in what it generated"
    else:
        place = f"in what call {departure.sampled_by.number} had generated"
    looks = "This is" if suspicion.certain else "This looks like"
    cause = suspicion.cause.value.replace("_", " ")
    return ShownDeparture(
        what=what,
        where=f"They differ first at position {departure.position:,} of {earlier.length:,}, {place}.",
        cut=departure.position > len(departure.expected()[0]),
        sides=(_side(earlier, departure.expected(), decode), _side(call, departure.found(), decode)),
        cause=f"{looks} {_article(cause)}: {suspicion.because}.",
        remedy=REMEDIES[suspicion.cause],
    )


def _article(cause: str) -> str:
    if cause == "retokenization":
        return "re-tokenisation"
    return f"{'an' if cause[0] in 'aeiou' else 'a'} {cause}"


def _side(call: PlacedCall, window: tuple[TokenIds, TokenIds], decode: Decode | None) -> Side:
    before, rest = (ids.tolist() for ids in window)
    text = None if decode is None else decode([*before, *rest])
    return Side(call.number, tuple(before), rest[0] if rest else None, tuple(rest[1:]), text)
