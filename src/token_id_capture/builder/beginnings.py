"""Which prompts start anew, and which earlier call each of them shares most with. Pure.

Parents come from the tokens alone. What a prompt departs from is for people, who know the calls in the
order of time: of two that differ, the later one departs. Every beginning is named once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from token_id_capture.builder.call_forest import CallForest, LinkedCall
from token_id_capture.builder.causes import Cause, agent_of, calls_beside, cause_of, difference, is_main_agent
from token_id_capture.builder.chains import Divergence
from token_id_capture.builder.prefix_tree import PrefixTree, PrefixTreeNode
from token_id_capture.lifecycle import Purpose
from token_id_capture.tokens import TokenIds


@dataclass(frozen=True, slots=True)
class Beginning:
    """A call that starts anew, the earlier call that it shares most with, and why.

    ``cause`` is None for the first turn of the main agent, if others spoke before.
    """

    call: LinkedCall
    earlier: LinkedCall
    divergence: Divergence
    cause: Cause | None


class _Told:
    """The calls of one agent that were made before, as a tree of their tokens, which grows when it is asked."""

    def __init__(self) -> None:
        self.calls: list[LinkedCall] = []
        self.longest = 0
        self._tree = PrefixTree()
        self._end: dict[int, PrefixTreeNode] = {}
        # A node on the path of each call that was asked about, from which it is inserted.
        self._reached: dict[int, PrefixTreeNode] = {}

    @property
    def compacted(self) -> bool:
        """Whether the last call was to compact the conversation."""
        return bool(self.calls) and self.calls[-1].entry.purpose is Purpose.COMPACTION

    def add(self, call: LinkedCall) -> None:
        self.calls.append(call)
        if call.length > self.longest:
            self.longest = call.length

    def closest(self, call: LinkedCall) -> tuple[LinkedCall, int] | None:
        """The earliest of the calls that share most with this one, and the first position that differs."""
        if not self.calls:
            return None
        for number in range(len(self._end), len(self.calls)):
            self._insert(number, self.calls[number])
        near = self.calls[-1]
        start = self._end[near.order].at_most(near.common_prefix_length(call.prompt))
        reached, node, agreed = self._tree.locate(call.prompt, start)
        self._reached[call.order] = reached
        if node.depth == agreed and node.call is not None:
            # The agreement stops where a call ends: what branches off there differs.
            if not node.branches:
                return None
            node = next(iter(node.branches.values()))
        return self.calls[node.first], agreed

    def _insert(self, number: int, call: LinkedCall) -> None:
        start = self._reached.pop(call.order, None)
        above = self._end.get(call.parent.order) if start is None and call.parent is not None else None
        if above is not None:
            tail = TokenIds.joined(call.link.interstitial, call.generation)
        else:
            start = start or self._tree.root
            tail = TokenIds.joined(call.prompt[start.depth :], call.generation)
        self._end[call.order] = self._tree.insert(number, tail, above or start or self._tree.root)


def beginnings(forest: CallForest) -> list[Beginning]:
    """Every prompt but the first that continues no call, or one that an earlier call continues too.

    In the order of time. A call and its retries have one prompt, of which the earliest is named.
    """
    if len(forest.groups) == len({parent for parent, _ in forest.groups}):
        return []
    everyone, told_by = _Told(), dict[tuple[str | None, bool], _Told]()
    beside = calls_beside(forest)
    several = len({agent_of(call.entry) for call in forest.calls}) > 1 or bool(beside)
    found = []
    for call, begins in _in_time(forest):
        speaker = agent_of(call.entry), call.order in beside
        told = told_by.setdefault(speaker, _Told()) if several else everyone
        # Both are asked, because a call is inserted from where it was found.
        places = [one.closest(call) for one in dict.fromkeys((told, everyone))] if begins else []
        place = next(filter(None, places), None)
        if place is not None:
            earlier, agreed = place
            cause = _cause(call, earlier, agreed, told, beside)
            found.append(Beginning(call, earlier, _divergence(call, earlier, agreed, cause), cause))
        for one in dict.fromkeys((told, everyone)):
            one.add(call)
    return found


def _cause(call: LinkedCall, earlier: LinkedCall, agreed: int, told: _Told, beside: frozenset[int]) -> Cause | None:
    if call.order in beside:
        return Cause.AUXILIARY
    if not told.calls:
        return None if is_main_agent(agent_of(call.entry)) else Cause.SUB_AGENT
    return cause_of(call, earlier, difference(call, earlier, agreed, told.longest), compacted=told.compacted)


def _in_time(forest: CallForest) -> Iterator[tuple[LinkedCall, bool]]:
    """The calls in the order of time, and whether each begins something beside an earlier one.

    A call is never older than the one that it continues, whatever the clocks say.
    """
    group_of = {call.order: number for number, group in enumerate(forest.groups.values()) for call in group.values()}
    time: list[float] = []
    for call in forest.calls:
        time.append(max(call.entry.created_at, time[call.parent.order] if call.parent is not None else 0.0))
    seen: dict[int | None, set[int]] = {}
    for call in sorted(forest.calls, key=lambda call: (time[call.order], call.depth, call.call_id)):
        siblings = seen.setdefault(None if call.parent is None else call.parent.order, set())
        yield call, bool(siblings) and group_of[call.order] not in siblings
        siblings.add(group_of[call.order])


def _divergence(call: LinkedCall, earlier: LinkedCall, position: int, cause: Cause | None) -> Divergence:
    return Divergence(
        model_call_id=call.call_id,
        turn=call.order + 1,
        prompt_length=len(call.prompt),
        parent_call_id=None if call.parent is None else call.parent.call_id,
        closest_call_id=earlier.call_id,
        closest_turn=earlier.order + 1,
        closest_prompt_length=len(earlier.prompt),
        closest_length=earlier.length,
        position=position,
        in_generation=position >= len(earlier.prompt),
        expected_token_id=earlier.token_at(position),
        found_token_id=call.prompt[position] if position < len(call.prompt) else None,
        cause=None if cause is None else cause.value,
    )
