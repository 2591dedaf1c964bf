"""How captured calls relate: which call continues which, from their tokens alone.

An append-only agent's call is compared with one earlier call, and where both are views of one
buffer (as a store reads them) that takes constant time. Only where a prompt continues none of the
nearest calls is a radix tree built and asked; it also tells how far the prompt agrees with which call.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable
from typing import Final, TypeAlias

from token_id_capture.builder.chains import ChainLink
from token_id_capture.builder.prefix_tree import PrefixTree, PrefixTreeNode
from token_id_capture.records import TokenEntry, media_of
from token_id_capture.tokens import TokenIds

NEAREST_TRIES: Final = 8
_NO_TOKENS: Final = TokenIds()

_Prompt: TypeAlias = tuple[TokenIds, tuple[str, ...]]
"""What a prompt adds to the sequence that it continues, and the digests of all its media."""


class LinkedCall:
    """A call and its place among the others. ``order`` and ``depth`` count from 0, and ``children`` are orders.

    Calls lead up to their parents only, so what was captured is freed with its last user.
    """

    __slots__ = (
        "anchor",
        "call_id",
        "children",
        "depth",
        "end",
        "entry",
        "generation",
        "length",
        "link",
        "media",
        "order",
        "parent",
        "prompt",
        "root_call_id",
        "root_created_at",
        "root_prompt_length",
    )

    def __init__(self, entry: TokenEntry, order: int, parent: LinkedCall | None, prompt: _Prompt) -> None:
        self.entry = entry
        self.call_id = entry.model_call_id
        self.prompt = entry.prompt_token_ids
        self.generation = entry.generation_token_ids
        interstitial, self.media = prompt
        self.length = len(self.prompt) + len(self.generation)
        self.order = order
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        # Of the first call of its conversation, to which nothing may lead back: that were a circle.
        self.root_prompt_length: int = len(self.prompt) if parent is None else parent.root_prompt_length
        self.root_call_id: str = self.call_id if parent is None else parent.root_call_id
        self.root_created_at: float = entry.created_at if parent is None else parent.root_created_at
        self.children: list[int] = []
        self.link = ChainLink(entry, interstitial if parent is not None else _NO_TOKENS)
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

    ``groups`` holds the calls that share a parent and a prompt with its media (a call and its retries) by their
    generation; ``copies`` names the call that a copy repeats. ``tries`` earlier calls are compared one
    by one before the tree is asked.
    """

    def __init__(self, tries: int = NEAREST_TRIES) -> None:
        self.calls: list[LinkedCall] = []
        self.roots: list[int] = []
        self.groups: dict[tuple[int | None, _Prompt], dict[TokenIds, LinkedCall]] = {}
        self.copies: dict[str, LinkedCall] = {}
        self._tries = tries
        self._by_length: list[tuple[int, int]] = []
        self._tree = PrefixTree()
        self._in_tree = 0

    def add(self, entry: TokenEntry) -> None:
        """Find the parent of ``entry`` and note how it relates to the calls before it."""
        prompt = entry.prompt_token_ids
        media = media_of(entry)
        parent, place = self._find_parent(prompt, media)
        interstitial = prompt[parent.length :] if parent is not None else prompt
        added = interstitial, media
        group = self.groups.setdefault((None if parent is None else parent.order, added), {})
        retried = next(iter(group.values()), None)
        call = LinkedCall(entry, len(self.calls), parent, added)
        known = group.setdefault(call.generation, call)
        if known is not call:
            self.copies[call.call_id] = known
            return
        siblings = self.roots if parent is None else parent.children
        if retried is not None:
            call.anchor = retried.anchor
        elif place is not None:
            call.anchor = place[0]
        siblings.append(call.order)
        self.calls.append(call)
        insort(self._by_length, (call.length, call.order))

    def group_of(self, call: LinkedCall) -> Iterable[LinkedCall]:
        """The call and all other answers to its prompt."""
        key = (
            None if call.parent is None else call.parent.order,
            (call.prompt if call.parent is None else call.link.interstitial, call.media),
        )
        return self.groups[key].values()

    def _find_parent(
        self, prompt: TokenIds, media: tuple[str, ...]
    ) -> tuple[LinkedCall | None, tuple[PrefixTreeNode, PrefixTreeNode, int] | None]:
        """The parent, and the prompt's place in the tree if that had to be asked.

        Of two calls with one sequence, cut differently into prompt and generation, the one with the
        longer prompt is the parent: it may itself continue a call that generated the rest. The placeholders of two
        images are alike, so what a prompt continues must also have had the media that it begins with.
        """
        candidates = bisect_right(self._by_length, (len(prompt), len(self.calls)))
        # From the longest on, so the first hit is the longest.
        tries = candidates if media else self._tries
        for index in range(candidates - 1, max(-1, candidates - 1 - tries), -1):
            call = self.calls[self._by_length[index][1]]
            if call.media == media[: len(call.media)] and prompt.startswith(call.prompt, call.generation):
                return call, None
        if candidates <= tries:
            return None, None
        place = self._locate(prompt, self.calls[self._by_length[candidates - 1][1]])
        ending = place[0].ending_call()
        found = None if ending is None else self.calls[ending]
        while found is not None and found.media != media[: len(found.media)]:
            found = found.parent
        return found, place

    def _locate(self, prompt: TokenIds, near: LinkedCall) -> tuple[PrefixTreeNode, PrefixTreeNode, int]:
        """The place of ``prompt`` in the tree, searched from where it departs from the call ``near``."""
        for call in self.calls[self._in_tree :]:
            start = call.anchor or (call.parent and call.parent.end) or self._tree.root
            tail = TokenIds.joined(call.prompt[start.depth :], call.generation)
            call.end = self._tree.insert(call.order, tail, start)
        self._in_tree = len(self.calls)
        assert near.end is not None, "every call is in the tree now"
        return self._tree.locate(prompt, near.end.at_most(near.common_prefix_length(prompt)))
