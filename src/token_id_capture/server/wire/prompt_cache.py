"""The prompts that rollouts sent last, as JSON text and as ids, so that no prompt is parsed twice."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import orjson

from token_id_capture.tokens import TokenIds

_TEXTS_PER_ROLLOUT: Final = 4
_OVERHEAD: Final = 512
"""Bytes of the objects around a text: of many short ones they are the most."""


@dataclass(slots=True)
class _Known:
    """An array's text without its closing bracket, and what it says."""

    text: bytes
    ids: TokenIds

    @property
    def size(self) -> int:
        return len(self.text) + self.ids.itemsize * len(self.ids) + _OVERHEAD

    def continued_by(self, text: bytes) -> bool:
        # What follows must end the last number: 12 does not continue 1.
        end = len(self.text)
        return text.startswith(self.text) and text[end : end + 1] in (b",", b"]")


class KnownTexts:
    """A bounded, least-recently-used map from a rollout to the arrays that its prompts began with.

    Only what was parsed before is in it, so it changes how fast an array is read and never what it
    says. A rollout has several arrays where its calls branch, as those of sub-agents do.
    """

    def __init__(self, capacity: int = 32 * 2**20) -> None:
        """``capacity`` is in bytes."""
        self._capacity = capacity
        self.held = 0
        self._rollouts: OrderedDict[str, list[_Known]] = OrderedDict()

    def read(self, rollout_id: str, text: bytes) -> TokenIds:
        """The ids of a JSON array.

        Raises:
            ValueError: it is not an array of ids.
        """
        if b"e" in text:
            raise ValueError("true and false are not ids, though Python treats them as integers")
        matching = [known for known in self._rollouts.get(rollout_id, ()) if known.continued_by(text)]
        if not matching:
            return TokenIds(orjson.loads(text))
        known = max(matching, key=lambda candidate: len(candidate.text))
        tail = text[len(known.text) :]
        if tail == b"]":
            return known.ids
        added = orjson.loads(b"[" + tail[1:])
        if not added:
            raise ValueError("a comma before the closing bracket")
        return TokenIds.joined(known.ids, TokenIds(added))

    def remember(self, rollout_id: str, text: bytes, ids: TokenIds) -> None:
        """Keep an array that ``read`` took, in place of those that it continues."""
        if not ids:
            return  # a comma after its bracket would be no JSON
        known = [other for other in self._rollouts.pop(rollout_id, ()) if not self._replaced(other, text)]
        known = [*known, _Known(text[:-1], ids)]
        self.held += known[-1].size
        if len(known) > _TEXTS_PER_ROLLOUT:
            self.held -= known.pop(0).size
        self._rollouts[rollout_id] = known
        while self.held > self._capacity and self._rollouts:
            _, oldest = self._rollouts.popitem(last=False)
            self.held -= sum(other.size for other in oldest)
        ids.buffer()  # joined now, or calls that nobody stores would keep each other's parts

    def _replaced(self, known: _Known, text: bytes) -> bool:
        if known.continued_by(text):
            self.held -= known.size
            return True
        return False
