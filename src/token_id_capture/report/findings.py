"""The findings of an explanation in the form in which the page shows them. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from token_id_capture.explanation import (
    CallTree,
    Decode,
    ExplainedDivergence,
    Explanation,
    Finding,
    PlacedCall,
    Suspicion,
)
from token_id_capture.explanation.wording import what_it_looks_like, where_it_departs, which_departs
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
class ShownDivergence:
    """Where a prompt departs from an earlier call, and what that looks like."""

    what: str
    where: str
    cut: bool
    sides: tuple[Side, Side]
    cause: str


@dataclass(frozen=True, slots=True)
class ShownFinding:
    """One reason, and all that is known about it."""

    reason: str
    what: str
    remedies: tuple[str, ...]
    concerns: tuple[Concern, ...]
    more_concerns: int
    divergences: tuple[ShownDivergence, ...]
    more_divergences: int


def shown_findings(explained: Explanation, decode: Decode | None) -> Iterator[ShownFinding]:
    """All findings, in the order of the explanation."""
    for finding in explained.findings:
        yield ShownFinding(
            reason=finding.reason,
            what=finding.what,
            remedies=finding.remedies,
            concerns=() if finding.divergences else tuple(_concerns(finding, explained.tree)),
            more_concerns=0 if finding.divergences else max(0, len(finding.calls) - _SHOWN_CALLS),
            divergences=tuple(_divergence(*pair, decode) for pair in finding.divergences),
            more_divergences=finding.more_divergences,
        )


def _concerns(finding: Finding, tree: CallTree | None) -> Iterator[Concern]:
    numbers = {call.entry.model_call_id: call.number for call in tree.calls} if tree is not None else {}
    for call_id, particulars in finding.calls[:_SHOWN_CALLS]:
        yield Concern(call_id, numbers.get(call_id), particulars)


def _divergence(divergence: ExplainedDivergence, suspicion: Suspicion, decode: Decode | None) -> ShownDivergence:
    return ShownDivergence(
        what=which_departs(divergence),
        where=f"{where_it_departs(divergence)}.",
        cut=divergence.position > len(divergence.expected()[0]),
        sides=(
            _side(divergence.earlier, divergence.expected(), decode),
            _side(divergence.call, divergence.found(), decode),
        ),
        cause=what_it_looks_like(suspicion),
    )


def _side(call: PlacedCall, window: tuple[TokenIds, TokenIds], decode: Decode | None) -> Side:
    before, rest = (ids.tolist() for ids in window)
    text = None if decode is None else decode([*before, *rest])
    return Side(call.number, tuple(before), rest[0] if rest else None, tuple(rest[1:]), text)
