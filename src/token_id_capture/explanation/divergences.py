"""Where a prompt departs from the earlier call that it resembles most: facts, no guesses. Pure.

The builder names the pairs in its own order, by length. Here the later of two conversations is the
one that departs, for that is what a person can look for in a harness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from token_id_capture.builder import Divergence
from token_id_capture.explanation.call_tree import CallTree, PlacedCall
from token_id_capture.tokens import TokenIds

Decode = Callable[[Sequence[int]], str]
"""The text of token ids, special tokens included."""

IDS_BEFORE: Final = 4
IDS_AFTER: Final = 6

# So many equal tokens on both sides mean that two sequences agree again; a chat template alone can
# make shorter runs equal.
_AGREEMENT: Final = 12
SHORT_SPAN: Final = 32
"""Up to so many tokens a difference is a matter of some words, not of whole messages."""


@dataclass(frozen=True, slots=True)
class Span:
    """From the first difference on, ``removed`` tokens of the earlier call are missing and ``added``
    tokens stand in their place; then both agree again, or the earlier call ends.

    ``same_text`` tells whether both read the same; None without a tokenizer.
    """

    removed: int
    added: int
    same_text: bool | None = None

    @property
    def is_short(self) -> bool:
        """Whether neither side has more than ``SHORT_SPAN`` tokens."""
        return max(self.removed, self.added) <= SHORT_SPAN


@dataclass(frozen=True, slots=True)
class ExplainedDivergence:
    """A prompt that does not continue ``earlier``; ``continues`` is the call that it does continue.

    ``position`` counts from 0 in the sequence of ``earlier`` and is the first that differs;
    ``sampled_by`` is the call that generated the token there, None for a token of a prompt.
    ``longest_before`` is the length of the longest sequence that calls made before had reached.
    ``span`` is None if the two never agree again; ``decoded`` tells whether texts were compared too.
    """

    call: PlacedCall
    earlier: PlacedCall
    continues: PlacedCall | None
    position: int
    sampled_by: PlacedCall | None
    longest_before: int
    root_prompt_length: int
    span: Span | None
    decoded: bool

    def expected(self) -> tuple[TokenIds, TokenIds]:
        """The ids of the earlier call around the position: some before it, and some from it on."""
        return _around(self.earlier.sequence, self.position)

    def found(self) -> tuple[TokenIds, TokenIds]:
        """The ids of the prompt around the position."""
        return _around(self.call.entry.prompt_token_ids, self.position)


def departing(tree: CallTree, divergence: Divergence) -> tuple[PlacedCall, PlacedCall, int]:
    """The call that departs, the earlier one that it departs from, and the first position that differs."""
    call, earlier = tree.find(divergence.model_call_id), tree.find(divergence.closest_call_id)
    if call.parent is None and _is_older(call, earlier):
        call, earlier = _first_beyond(earlier, divergence.position), call
    return call, earlier, earlier.sequence.common_prefix_length(call.entry.prompt_token_ids)


def explain_divergence(tree: CallTree, divergence: Divergence, decode: Decode | None = None) -> ExplainedDivergence:
    """What the calls tell about a divergence that the builder noted."""
    call, earlier, position = departing(tree, divergence)
    sequence, prompt = earlier.sequence, call.entry.prompt_token_ids
    return ExplainedDivergence(
        call=call,
        earlier=earlier,
        continues=call.parent,
        position=position,
        sampled_by=_sampled_by(earlier, position),
        longest_before=_longest_before(tree, call),
        root_prompt_length=len([*earlier.path()][-1].entry.prompt_token_ids),
        span=_span(sequence, prompt, position, decode),
        decoded=decode is not None,
    )


def _is_older(call: PlacedCall, other: PlacedCall) -> bool:
    ours, theirs = call.entry.created_at, other.entry.created_at
    return 0 < ours < theirs


def _first_beyond(call: PlacedCall, position: int) -> PlacedCall:
    """The first call of this conversation whose prompt reaches beyond the position."""
    reaching = [one for one in call.path() if len(one.entry.prompt_token_ids) > position]
    return reaching[-1] if reaching else call


def _sampled_by(call: PlacedCall, position: int) -> PlacedCall | None:
    for one in call.path():
        start = len(one.entry.prompt_token_ids)
        if start <= position < start + len(one.entry.generation_token_ids):
            return one
    return None


def _longest_before(tree: CallTree, call: PlacedCall) -> int:
    before = [other for other in tree.calls if other is not call and _is_older(other, call)]
    return max((other.length for other in before), default=0)


def _around(tokens: TokenIds, position: int) -> tuple[TokenIds, TokenIds]:
    return tokens[max(0, position - IDS_BEFORE) : position], tokens[position : position + IDS_AFTER]


def _span(sequence: TokenIds, prompt: TokenIds, position: int, decode: Decode | None) -> Span | None:
    old, new = sequence[position:], prompt[position:]
    if not old or not new:
        return None
    near = SHORT_SPAN + _AGREEMENT
    sizes = _short_span(old[:near].tolist(), new[:near].tolist()) or _long_span(old, new)
    if decode is None:
        return Span(*sizes) if sizes is not None else None
    start = max(0, position - IDS_BEFORE)
    if sizes is not None:
        removed, added = sizes
        texts = [decode(sequence[start : position + removed]), decode(prompt[start : position + added])]
        return Span(removed, added, same_text=texts[0] == texts[1])
    if len(old) <= SHORT_SPAN:
        return _same_text_to_the_end(sequence[start:], prompt[start:], position - start, decode)
    return None


def _short_span(old: list[int], new: list[int]) -> tuple[int, int] | None:
    """The smallest numbers of tokens to leave out on both sides after which both agree."""
    for total in range(1, 2 * SHORT_SPAN + 1):
        for removed in range(max(0, total - SHORT_SPAN), min(total, SHORT_SPAN) + 1):
            added = total - removed
            agreeing = old[removed : removed + _AGREEMENT]
            if len(agreeing) == _AGREEMENT and new[added : added + _AGREEMENT] == agreeing:
                return removed, added
    return None


def _long_span(old: TokenIds, new: TokenIds) -> tuple[int, int] | None:
    """Tokens that were only left out, or only put in, however many."""
    removed = _find(old, new[:_AGREEMENT])
    if removed is not None:
        return removed, 0
    added = _find(new, old[:_AGREEMENT])
    return None if added is None else (0, added)


def _find(tokens: TokenIds, wanted: TokenIds) -> int | None:
    if len(wanted) < _AGREEMENT:
        return None
    haystack, needle, at = tokens.tobytes(), wanted.tobytes(), -1
    while (at := haystack.find(needle, at + 1)) >= 0:
        if at % TokenIds.itemsize == 0:
            return at // TokenIds.itemsize
    return None


def _same_text_to_the_end(old: TokenIds, new: TokenIds, agreed: int, decode: Decode) -> Span | None:
    """Whether some tokens of the prompt read as all that is left of the earlier call."""
    text = decode(old)
    for end in range(agreed + 1, min(len(new), 2 * len(old) + SHORT_SPAN) + 1):
        candidate = decode(new[:end])
        if candidate == text:
            return Span(len(old) - agreed, end - agreed, same_text=True)
        if len(candidate) > len(text) + 4:
            break
    return None
