"""Where a prompt departs from the earlier call that it shares most with: facts, no guesses. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from token_id_capture.builder import Divergence
from token_id_capture.builder.causes import SHORT_SPAN, Cause, Span, agent_of, find_span
from token_id_capture.explanation.call_tree import CallTree, PlacedCall
from token_id_capture.tokens import TokenIds

Decode = Callable[[Sequence[int]], str]
"""The text of token ids, special tokens included."""

IDS_BEFORE: Final = 4
IDS_AFTER: Final = 6


@dataclass(frozen=True, slots=True)
class ExplainedDivergence:
    """A prompt that does not continue ``earlier``; ``continues`` is the call that it does continue.

    ``position`` counts from 0 in the sequence of ``earlier`` and is the first that differs;
    ``sampled_by`` is the call that generated the token there, None for a token of a prompt.
    ``longest_before`` is the length of the longest sequence that calls made before had reached.
    ``span`` is None if the two never agree again; ``decoded`` tells whether texts were compared too.
    ``cause`` is what the builder made of the facts, without a tokenizer.
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
    cause: Cause

    @property
    def answer_left(self) -> int:
        """How many tokens of the answer begin at the position."""
        return 0 if self.sampled_by is None else self.sampled_by.length - self.position

    def expected(self) -> tuple[TokenIds, TokenIds]:
        """The ids of the earlier call around the position: some before it, and some from it on."""
        return _around(self.earlier.sequence, self.position)

    def found(self) -> tuple[TokenIds, TokenIds]:
        """The ids of the prompt around the position."""
        return _around(self.call.entry.prompt_token_ids, self.position)


def explain_divergence(tree: CallTree, divergence: Divergence, decode: Decode | None = None) -> ExplainedDivergence:
    """What the calls tell about a divergence that the builder noted."""
    call, earlier = tree.find(divergence.model_call_id), tree.find(divergence.closest_call_id)
    position, sampled_by = divergence.position, _sampled_by(earlier, divergence.position)
    return ExplainedDivergence(
        call=call,
        earlier=earlier,
        continues=call.parent,
        position=position,
        sampled_by=sampled_by,
        longest_before=_longest_before(tree, call),
        root_prompt_length=len([*earlier.path()][-1].entry.prompt_token_ids),
        span=_span(earlier, call, position, sampled_by, decode),
        decoded=decode is not None,
        cause=Cause.EDITED_HISTORY if divergence.cause is None else Cause(divergence.cause),
    )


def _sampled_by(call: PlacedCall, position: int) -> PlacedCall | None:
    for one in call.path():
        start = len(one.entry.prompt_token_ids)
        if start <= position < start + len(one.entry.generation_token_ids):
            return one
    return None


def _longest_before(tree: CallTree, call: PlacedCall) -> int:
    before = [
        other
        for other in tree.calls
        if other.entry.created_at < call.entry.created_at and agent_of(other.entry) == agent_of(call.entry)
    ]
    return max((other.length for other in before), default=0)


def _around(tokens: TokenIds, position: int) -> tuple[TokenIds, TokenIds]:
    return tokens[max(0, position - IDS_BEFORE) : position], tokens[position : position + IDS_AFTER]


def _span(
    earlier: PlacedCall, call: PlacedCall, position: int, sampled_by: PlacedCall | None, decode: Decode | None
) -> Span | None:
    sequence, prompt = earlier.sequence, call.entry.prompt_token_ids
    answer_left = 0 if sampled_by is None else sampled_by.length - position
    span = find_span(sequence[position:], prompt[position:], answer_left)
    if decode is None or (span is not None and span.one_sided):
        return span
    start = max(0, position - IDS_BEFORE)
    if span is not None:
        texts = [decode(sequence[start : position + span.removed]), decode(prompt[start : position + span.added])]
        return replace(span, same_text=texts[0] == texts[1])
    if 0 < len(sequence) - position <= SHORT_SPAN and position < len(prompt):
        return _same_text_to_the_end(sequence[start:], prompt[start:], position - start, decode)
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
