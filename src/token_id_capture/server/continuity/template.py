"""What is known of a chat template from its output: where its text behind an answer begins, by the answer's shape."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, TypeAlias

from token_id_capture.recent import Newest
from token_id_capture.tokens import TokenIds

Message: TypeAlias = Mapping[str, Any]
Render: TypeAlias = Callable[[Sequence[Message], bool], Awaitable[TokenIds]]
"""Renders messages as the engine would; the second argument asks for the start of the next answer behind them."""

WORDS: Final = ("a", "b")
"""The texts of stand-ins for answers."""
_SHAPES_REMEMBERED: Final = 4096


@dataclass(frozen=True, slots=True)
class Tail:
    """What the template writes behind a stand-in: ``rendered`` from ``start`` on.

    ``overlap`` is how many tokens before it a request has to have before it too: 1 if the end of the turn is
    there, 0 if it is a word of the stand-in. ``anchored`` says that the end of the turn is at its start or before
    it; else the request may have something else between the answer and the tail.
    """

    rendered: TokenIds
    start: int
    overlap: int
    anchored: bool = True

    @property
    def ids(self) -> TokenIds:
        """Its tokens."""
        return self.rendered[self.start :]

    def ends(self, whole: TokenIds) -> bool:
        """Whether a prompt ends with it."""
        seen = self.rendered[self.start - self.overlap :]
        return whole[max(0, len(whole) - len(seen)) :] == seen


@dataclass(frozen=True, slots=True)
class Start:
    """What came before a tail: so many tokens, of which this is the digest."""

    length: int
    overlap: int
    digest: bytes

    def tail(self, rendered: TokenIds) -> Tail | None:
        """The tail of another rendering; None if it does not begin with the same tokens."""
        same = len(rendered) >= self.length and _digest(rendered[: self.length]) == self.digest
        return Tail(rendered, self.length, self.overlap) if same else None


class TemplateMemory:
    """What was found out about templates, by the shape of answers; bounded.

    ``scope`` names a model, its tools and template arguments.
    """

    def __init__(self) -> None:
        self._endings: Newest[Any, TokenIds] = Newest(_SHAPES_REMEMBERED)
        self._starts: Newest[Any, Start | None] = Newest(_SHAPES_REMEMBERED)

    async def ending(
        self, scope: bytes, context: Sequence[Message], stand_ins: Sequence[Message], render: Render
    ) -> TokenIds:
        """What the template writes behind answers like these if nothing follows."""
        key = scope, len(context), shape_of(stand_ins[0])
        if key not in self._endings:
            first, second = await asyncio.gather(*(render([*context, stand_in], False) for stand_in in stand_ins))
            # Copied, or each would keep its whole rendering, which has the system message and the tools.
            self._endings[key] = TokenIds.from_bytes(common_end(first, second).tobytes())
        return self._endings[key]

    def start(self, key: Any) -> Start | None:
        """Where the tail began last time behind such a stand-in."""
        return self._starts.get(key)

    def keep_start(self, key: Any, tail: Tail) -> None:
        """Remember what comes before an anchored tail."""
        if tail.anchored and self._starts.get(key, tail) is not None:
            before = tail.rendered[: tail.start]
            self._starts[key] = Start(len(before), tail.overlap, _digest(before))

    def give_up(self, key: Any) -> None:
        """Never look for it again: what differs once, as where a template writes the ids of calls, differs always."""
        self._starts[key] = None


def _digest(ids: TokenIds) -> bytes:
    return blake2b(ids.buffer(), digest_size=16).digest()


def shape_of(stand_in: Message) -> tuple[Any, ...]:
    """Whether it has words, and which tools it calls."""
    names = (call["function"].get("name") for call in stand_in.get("tool_calls") or ())
    return stand_in["content"] in WORDS, *names


def common_end(first: TokenIds, second: TokenIds) -> TokenIds:
    """The longest end of both. Halving compares whole runs, which is faster than token by token."""
    shorter, longer = 0, min(len(first), len(second))
    while shorter < longer:
        middle = (shorter + longer + 1) // 2
        if first[len(first) - middle :] == second[len(second) - middle :]:
            shorter = middle
        else:
            longer = middle - 1
    return first[len(first) - shorter :]
