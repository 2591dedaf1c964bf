"""Why a prompt does not continue the calls before it, decided by facts. Pure.

Facts come before guesses: whose call it is, then what differs. Only where neither decides is the
prompt called edited.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from token_id_capture.builder.call_forest import CallForest, LinkedCall
from token_id_capture.lifecycle import MAIN_AGENT, CallOrigin, Purpose
from token_id_capture.records import TokenEntry
from token_id_capture.tokens import TokenIds

SHORT_SPAN: Final = 32
"""Up to so many tokens a difference is a matter of some words, not of whole messages."""

# So many equal tokens on both sides mean that two sequences agree again; a chat template alone can
# make shorter runs equal. The rest of an answer counts whatever its length.
_AGREEMENT: Final = 12
# A thought may begin behind the tokens that open it.
_START_OF_ANSWER: Final = 4


class Cause(StrEnum):
    """Why a sequence starts anew."""

    SUB_AGENT = "sub_agent"
    """Another agent's conversation."""
    AUXILIARY = "auxiliary"
    """A call beside the conversation, such as its title."""
    COMPACTION = "compaction"
    """The agent's conversation starts again with a shorter account of what went before."""
    RETOKENIZATION = "retokenization"
    """The same text came back as other tokens."""
    DROPPED_REASONING = "dropped_reasoning"
    """The thoughts before an answer are missing in its history."""
    EDITED_HISTORY = "edited_history"
    """An earlier message was changed, cut or dropped."""
    BRANCH = "branch"
    """It continues a call that another call continues too."""
    RETRY = "retry"
    """It answers a prompt that was answered before."""
    LOST_CALL = "lost_call"
    """The history holds an answer that was never captured; what an edited history looks like if a call was lost."""


@dataclass(frozen=True, slots=True)
class Span:
    """From the first difference on, ``removed`` tokens of the earlier call are missing and ``added``
    tokens stand in their place; then both agree again.

    ``same_text`` tells whether both read the same; None without a tokenizer.
    """

    removed: int
    added: int
    same_text: bool | None = None

    @property
    def is_short(self) -> bool:
        """Whether neither side has more than ``SHORT_SPAN`` tokens."""
        return max(self.removed, self.added) <= SHORT_SPAN

    @property
    def one_sided(self) -> bool:
        """Whether tokens were only left out, or only put in."""
        return not self.removed or not self.added


@dataclass(frozen=True, slots=True)
class Difference:
    """How a prompt differs from the earlier call that it shares most with; positions count tokens.

    ``sampled_by`` is the call that sampled the token at ``position`` of the earlier sequence, None for a
    token of a prompt, and ``answer_left`` how much of its answer begins there. ``holds_sampled`` says
    whether the prompt has a sampled token of the earlier conversation before or behind the difference.
    ``span`` is None if the two never agree again. ``longest_before`` is the longest sequence that calls
    of this agent had reached before.
    """

    position: int
    sampled_by: LinkedCall | None
    answer_left: int
    holds_sampled: bool
    span: Span | None
    longest_before: int


def agent_of(entry: TokenEntry) -> str | None:
    """Whose call it is: the agent, else the session that the harness named; None if it told neither."""
    if entry.agent is not None:
        return entry.agent
    session = (entry.model_extra or {}).get("session_headers")
    return repr(sorted(session.items())) if isinstance(session, Mapping) and session else None


def is_main_agent(agent: str | None) -> bool:
    """Whether it is the main agent, or may be it because the harness does not tell agents apart."""
    return agent is None or agent == MAIN_AGENT


def calls_beside(forest: CallForest) -> frozenset[int]:
    """The calls, by their order, that are not turns of a conversation: titles, summaries, prewarming.

    The harness says so; or they offer no tools although others of their agent do, and nothing continues them.
    """
    with_tools = {agent_of(call.entry) for call in forest.calls if call.entry.offers_tools}
    return frozenset(call.order for call in forest.calls if _is_beside(call, with_tools))


def _is_beside(call: LinkedCall, with_tools: set[str | None]) -> bool:
    return not call.children and is_beside(call.entry.origin, agent_of(call.entry) in with_tools)


def is_beside(origin: CallOrigin, agent_has_tools: bool) -> bool:
    """Whether a call that nothing continues is not a turn of its agent's conversation."""
    if origin.purpose is not None:
        return origin.purpose in (Purpose.AUXILIARY, Purpose.PREWARM)
    return origin.offers_tools is False and agent_has_tools


def difference(call: LinkedCall, earlier: LinkedCall, position: int, longest_before: int) -> Difference:
    """The facts about a prompt that agrees with ``earlier`` up to ``position``."""
    one: LinkedCall | None = earlier
    while one is not None and len(one.prompt) > position:
        one = one.parent
    sampled_by = one if one is not None and position < one.length else None
    answer_left = 0 if sampled_by is None else sampled_by.length - position
    old = TokenIds.joined(earlier.prompt, earlier.generation)[position:]
    span = find_span(old, call.prompt[position:], answer_left)
    first = earlier.root_prompt_length
    holds = position > first
    if span is not None and not holds:
        # What follows the difference is alike for a while; only if that reaches an answer is one held.
        alike = old[span.removed :].common_prefix_length(call.prompt[position + span.added :])
        holds = alike > 0 and position + span.removed + alike > first
    return Difference(position, sampled_by, answer_left, holds, span, longest_before)


def cause_of(call: LinkedCall, earlier: LinkedCall, found: Difference, *, compacted: bool) -> Cause:
    """What the facts show of two calls of one agent, as far as agents are known.

    ``compacted``: the agent's last call before was to compact the conversation.
    """
    known = agent_of(call.entry) is not None
    if found.sampled_by is not None and found.span is not None:
        return _of_answer(found, found.span, found.sampled_by)
    if call.parent is not None and found.sampled_by is None:
        return Cause.BRANCH
    if compacted and not found.holds_sampled:
        return Cause.COMPACTION
    if _only_its_end_differs(call, found):
        return Cause.RETOKENIZATION
    restarts = len(call.prompt) < found.longest_before
    same_beginning = found.position >= earlier.root_prompt_length
    if not found.holds_sampled and restarts and (known or same_beginning):
        return Cause.COMPACTION
    if not found.holds_sampled and not known and found.span is None and not same_beginning:
        return Cause.SUB_AGENT
    return Cause.EDITED_HISTORY


def _only_its_end_differs(call: LinkedCall, found: Difference) -> bool:
    """Whether an answer begins as it was sampled and only its last words are others, as where a template ends it."""
    if found.sampled_by is None or len(call.prompt) <= found.position:
        return False
    begins = found.position > len(found.sampled_by.prompt)
    return found.answer_left == 1 or (begins and found.answer_left <= SHORT_SPAN)


def _of_answer(found: Difference, span: Span, sampled_by: LinkedCall) -> Cause:
    if not span.one_sided and (span.same_text or (span.same_text is None and span.is_short)):
        return Cause.RETOKENIZATION
    at_start = found.position - len(sampled_by.prompt) <= _START_OF_ANSWER
    if at_start and span.removed and not span.added and has_reasoning(sampled_by.entry):
        return Cause.DROPPED_REASONING
    return Cause.EDITED_HISTORY


def has_reasoning(entry: TokenEntry) -> bool:
    """Whether the stored answer has thoughts."""
    return any(map(_is_reasoning, entry.output_items))


def _is_reasoning(item: Mapping[str, Any]) -> bool:
    if item.get("type") == "reasoning":
        return bool(item.get("content") or item.get("summary") or item.get("text"))
    return bool(item.get("reasoning_content") or item.get("reasoning"))


def find_span(old: TokenIds, new: TokenIds, answer_left: int) -> Span | None:
    """Where two sequences that differ in their first token agree again; None if they do not.

    ``answer_left`` is how many tokens of ``old`` belong to the answer in which they differ: an agreement
    up to its last token counts, however short.
    """
    if not old or not new:
        return None
    near = SHORT_SPAN + _AGREEMENT
    old_near, new_near = old[:near], new[:near]
    found = [*_long_runs(old_near, new_near), *_ends_of_answer(old, new_near, answer_left)]
    if found:
        return Span(*min(found, key=sum))
    return _one_sided(old, new, answer_left)


def _long_runs(old: TokenIds, new: TokenIds) -> list[tuple[int, int]]:
    """Pairs of short lengths behind which a whole run is equal."""
    haystack, text, size = old.tobytes(), new.tobytes(), TokenIds.itemsize
    starts = range(min(SHORT_SPAN, len(new) - _AGREEMENT) + 1)
    hits = ((_find(haystack, text[added * size : (added + _AGREEMENT) * size]), added) for added in starts)
    return [(removed, added) for removed, added in hits if removed is not None and removed <= SHORT_SPAN]


def _ends_of_answer(old: TokenIds, new: TokenIds, answer_left: int) -> list[tuple[int, int]]:
    """The same where less than a run is left of the answer."""
    pairs = []
    for left in range(1, min(_AGREEMENT, answer_left)):
        removed = answer_left - left
        added = find(new, old[removed:answer_left]) if removed <= SHORT_SPAN else None
        if added is not None and added <= SHORT_SPAN:
            pairs.append((removed, added))
    return pairs


def _one_sided(old: TokenIds, new: TokenIds, answer_left: int) -> Span | None:
    """Tokens that were only left out, or only put in, however many."""
    removed = find(old, new[:_AGREEMENT]) if len(new) >= _AGREEMENT else None
    if removed is not None:
        return Span(removed, 0)
    for left in range(min(_AGREEMENT, answer_left, len(new)) - 1, 0, -1):
        if new.startswith(old[answer_left - left : answer_left]):
            return Span(answer_left - left, 0)
    added = find(new, old[:_AGREEMENT]) if len(old) >= _AGREEMENT else None
    return None if added is None else Span(0, added)


def find(tokens: TokenIds, wanted: TokenIds) -> int | None:
    """Where ``wanted`` stands first in ``tokens``."""
    return _find(tokens.tobytes(), wanted.tobytes())


def _find(haystack: bytes, needle: bytes) -> int | None:
    """The same in packed items."""
    at = -1
    while (at := haystack.find(needle, at + 1)) >= 0:
        if at % TokenIds.itemsize == 0:
            return at // TokenIds.itemsize
    return None
