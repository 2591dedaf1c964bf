"""Divergences in sentences, for everything that shows them. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from token_id_capture.builder.causes import Cause
from token_id_capture.explanation.call_tree import PlacedCall
from token_id_capture.explanation.causes import Suspicion
from token_id_capture.explanation.divergences import ExplainedDivergence

Name = Callable[[PlacedCall], str]
"""What a call is called in the middle of a sentence."""

_CAUSES: Final[dict[Cause, str]] = {
    Cause.RETOKENIZATION: "re-tokenisation",
    Cause.EDITED_HISTORY: "an edited history",
    Cause.COMPACTION: "a compaction",
    Cause.SUB_AGENT: "a separate agent",
    Cause.AUXILIARY: "a call beside the conversation",
    Cause.DROPPED_REASONING: "a dropped thought",
    Cause.BRANCH: "a branch",
    Cause.RETRY: "a retry",
    Cause.LOST_CALL: "a lost call",
}


def counted(number: int, one: str, many: str = "") -> str:
    """``1 call``, ``1,204 calls``."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def by_number(call: PlacedCall) -> str:
    """The name of a call where a reader sees the numbers."""
    return f"call {call.number}"


def which_departs(divergence: ExplainedDivergence, name: Name = by_number) -> str:
    """Which call continues what, and what not."""
    call, earlier, continues = divergence.call, divergence.earlier, divergence.continues
    if continues is None:
        said = f"{name(call)} continues no earlier call. The closest is {name(earlier)}."
    else:
        said = f"{name(call)} continues {by_number(continues)}, but not {name(earlier)}."
    return said[0].upper() + said[1:]


def where_it_departs(divergence: ExplainedDivergence, name: Name = by_number) -> str:
    """The first position that differs, without a full stop, because the ids may follow."""
    if divergence.sampled_by is None:
        place = "in its prompt"
    elif divergence.sampled_by is divergence.earlier:
        place = "in what it generated"
    else:
        place = f"in what {name(divergence.sampled_by)} had generated"
    return f"They differ first at position {divergence.position:,} of {divergence.earlier.length:,}, {place}"


def what_it_looks_like(suspicion: Suspicion) -> str:
    """The cause, and what speaks for it."""
    looks = "This is" if suspicion.certain else "This looks like"
    return f"{looks} {_CAUSES[suspicion.cause]}: {suspicion.because}."
