"""How captured calls relate: which call continues which, from their tokens alone.

An append-only agent's call is compared with one earlier call, and where both are views of one
buffer (as a store reads them) that takes constant time. Only where a prompt continues none of the
nearest calls is a radix tree built and asked; it also tells how far the prompt agrees with which call.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import Final

from token_id_capture.builder.chains import ChainLink, Divergence
from token_id_capture.builder.prefix_tree import PrefixTree, PrefixTreeNode
from token_id_capture.records import TokenEntry
from token_id_capture.tokens import TokenIds

NEAREST_TRIES: Final = 8


class LinkedCall:
    """A call and its place among the others. ``order`` counts from 0, and ``children`` are orders.

    Calls lead up to their parents only, so what was captured is freed with its last user.
    """

    __slots__ = (
        "anchor",
        "call_id",
        "children",
        "end",
        "entry",
        "generation",
        "length",
        "link",
        "order",
        "parent",
        "prompt",
    )

    def __init__(self, entry: TokenEntry, order: int, parent: LinkedCall | None, interstitial: TokenIds) -> None:
        self.entry = entry
        self.call_id = entry.model_call_id
        self.prompt = entry.prompt_token_ids
        self.generation = entry.generation_token_ids
        self.length = len(self.prompt) + len(self.generation)
        self.order = order
        self.parent = parent
        self.children: list[int] = []
        self.link = ChainLink(entry, interstitial if parent is not None else TokenIds())
        # Where the tree holds the end of this call, and a node above it from which to insert it.
        self.end: PrefixTreeNode | None = None
        self.anchor: PrefixTreeNode | None = None

    def common_prefix_length(self, prompt: TokenIds) -> int:
        """The number of leading tokens that ``prompt`` shares with this call's sequence."""
        agreed = prompt.common_prefix_length(self.prompt)
        if agreed == len(self.prompt):
            agreed += prompt[agreed:].common_prefix_length(self.generation)
        return agreed

    def token_at(self, position: int) -> int:
        """The token at ``position`` of prompt + generation."""
        generated = position - len(self.prompt)
        return self.prompt[position] if generated < 0 else self.generation[generated]

    def path(self) -> list[LinkedCall]:
        """The calls from the root to this one."""
        path = [self]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        return path[::-1]


class CallForest:
    """Links calls, which must be added in builder order, to their parents.

    ``groups`` holds the calls that share a parent and a prompt (a call and its retries) by their
    generation; ``copies`` names the call that a copy repeats. ``tries`` earlier calls are compared one
    by one before the tree is asked.
    """

    def __init__(self, tries: int = NEAREST_TRIES) -> None:
        self.calls: list[LinkedCall] = []
        self.roots: list[int] = []
        self.groups: dict[tuple[int | None, TokenIds], dict[TokenIds, LinkedCall]] = {}
        self.copies: dict[str, LinkedCall] = {}
        self.divergences: list[Divergence] = []
        self._tries = tries
        self._by_length: list[tuple[int, int]] = []
        self._tree = PrefixTree()
        self._in_tree = 0

    def add(self, entry: TokenEntry) -> None:
        """Find the parent of ``entry`` and note how it relates to the calls before it."""
        prompt = entry.prompt_token_ids
        parent, place = self._find_parent(prompt)
        interstitial = prompt[parent.length :] if parent is not None else prompt
        group = self.groups.setdefault((None if parent is None else parent.order, interstitial), {})
        retried = next(iter(group.values()), None)
        call = LinkedCall(entry, len(self.calls), parent, interstitial)
        known = group.setdefault(call.generation, call)
        if known is not call:
            self.copies[call.call_id] = known
            return
        siblings = self.roots if parent is None else parent.children
        if retried is not None:
            call.anchor = retried.anchor
        elif siblings:
            call.anchor, below, agreed = place or self._locate(prompt, self.calls[siblings[-1]])
            self.divergences.append(self._divergence(call, below, agreed))
        siblings.append(call.order)
        self.calls.append(call)
        insort(self._by_length, (call.length, call.order))

    def _find_parent(
        self, prompt: TokenIds
    ) -> tuple[LinkedCall | None, tuple[PrefixTreeNode, PrefixTreeNode, int] | None]:
        """The parent, and the prompt's place in the tree if that had to be asked.

        Of two calls with one sequence, cut differently into prompt and generation, the one with the
        longer prompt is the parent: it may itself continue a call that generated the rest.
        """
        candidates = bisect_right(self._by_length, (len(prompt), len(self.calls)))
        # From the longest on, so the first hit is the longest.
        for index in range(candidates - 1, max(-1, candidates - 1 - self._tries), -1):
            call = self.calls[self._by_length[index][1]]
            if prompt.startswith(call.prompt, call.generation):
                return call, None
        if candidates <= self._tries:
            return None, None
        place = self._locate(prompt, self.calls[self._by_length[candidates - 1][1]])
        found = place[0].ending_call()
        return (None if found is None else self.calls[found]), place

    def _locate(self, prompt: TokenIds, near: LinkedCall) -> tuple[PrefixTreeNode, PrefixTreeNode, int]:
        """The place of ``prompt`` in the tree, searched from where it departs from the call ``near``."""
        for call in self.calls[self._in_tree :]:
            start = call.anchor or (call.parent and call.parent.end) or self._tree.root
            tail = TokenIds.joined(call.prompt[start.depth :], call.generation)
            call.end = self._tree.insert(call.order, tail, start)
        self._in_tree = len(self.calls)
        assert near.end is not None, "every call is in the tree now"
        return self._tree.locate(prompt, near.end.at_most(near.common_prefix_length(prompt)))

    def _divergence(self, call: LinkedCall, below: PrefixTreeNode, agreed: int) -> Divergence:
        # Where the agreement stops at the end of the parent itself, siblings branch off there; the
        # first branch holds the earliest one, for calls are inserted in order.
        node = next(iter(below.branches.values())) if below.call is not None and below.depth == agreed else below
        closest = self.calls[node.first]
        return Divergence(
            model_call_id=call.call_id,
            turn=call.order + 1,
            prompt_length=len(call.prompt),
            parent_call_id=None if call.parent is None else call.parent.call_id,
            closest_call_id=closest.call_id,
            closest_turn=closest.order + 1,
            closest_prompt_length=len(closest.prompt),
            closest_length=closest.length,
            position=agreed,
            in_generation=agreed >= len(closest.prompt),
            expected_token_id=closest.token_at(agreed),
            found_token_id=call.prompt[agreed] if agreed < len(call.prompt) else None,
        )
