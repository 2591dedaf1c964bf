"""How one sequence of tokens is made from another: what is copied, and what is put in between. Pure."""

from __future__ import annotations

from typing import Final, TypeAlias

from token_id_capture.builder.causes import Span, find, find_span
from token_id_capture.tokens import TokenIds

Step: TypeAlias = tuple[int, int, int]
"""Copy the tokens of the old sequence from the first number on, as many as the second says; then put in as many
new ones as the third says."""

_MOST_STEPS: Final = 64
_ANCHOR: Final = 24
_MOST_ANCHORS: Final = 48


def steps_between(old: TokenIds, new: TokenIds) -> tuple[Step, ...]:
    """The steps that make ``new`` of ``old``, at most 64; what lies between two copies is missing in ``new``."""
    steps: list[Step] = []
    at_old = at_new = 0
    while True:
        left_old, left_new = old[at_old:], new[at_new:]
        length = left_old.common_prefix_length(left_new)
        left_old, left_new = left_old[length:], left_new[length:]
        last = len(steps) == _MOST_STEPS - 1 or not left_old or not left_new
        span = None if last else find_span(left_old, left_new, 0) or _later_agreement(left_old, left_new)
        added = len(left_new) if span is None else span.added
        steps.append((at_old, length, added))
        if span is None:
            return tuple(steps)
        at_old += length + span.removed
        at_new += length + span.added


def _later_agreement(old: TokenIds, new: TokenIds) -> Span | None:
    """Where both agree again behind a longer difference, as where a whole message was replaced."""
    for number in range(1, _MOST_ANCHORS + 1):
        # Close together at first, then wider apart.
        added = number * _ANCHOR * max(1, number // 8)
        if added + _ANCHOR > len(new):
            return None
        removed = find(old, new[added : added + _ANCHOR])
        if removed is not None:
            back = _common_suffix_length(old[:removed], new[:added])
            return Span(removed - back, added - back)
    return None


def _common_suffix_length(first: TokenIds, second: TokenIds) -> int:
    length = 0
    for one, other in zip(reversed(first), reversed(second), strict=False):
        if one != other:
            break
        length += 1
    return length
