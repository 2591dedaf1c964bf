"""The prompts that rollouts sent last, as JSON text and as ids, so that no prompt is parsed or written twice."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Final

import orjson

from token_id_capture.recent import RecentByRollout
from token_id_capture.tokens import TokenIds, common_start

_OVERHEAD: Final = 512
"""Bytes of the objects around a text: of many short ones they are the most."""


@dataclass(slots=True)
class _Known:
    """An array's text, and what it says."""

    text: bytes
    ids: TokenIds

    @property
    def size(self) -> int:
        return len(self.text) + self.ids.itemsize * len(self.ids) + _OVERHEAD

    @property
    def end(self) -> int:
        """Where its closing bracket is."""
        return len(self.text) - 1

    def is_continued_by(self, text: bytes) -> bool:
        """Whether an array begins with this one."""
        # What follows must end the last number: 12 does not continue 1.
        return text.startswith(memoryview(self.text)[:-1]) and text[self.end : self.end + 1] in (b",", b"]")

    def shared_with(self, text: bytes) -> int:
        """How much of both texts is the same and ends with a whole number; 0 if nothing is."""
        if self.is_continued_by(text):
            return self.end
        return max(0, text.rfind(b",", 0, common_start(text, self.text)))

    def ids_before(self, end: int) -> TokenIds:
        """The ids in so much of the text, which ends with a whole number."""
        if end == self.end:
            return self.ids
        if end > self.end // 2:
            return self.ids[: len(self.ids) - self.text.count(b",", end)]
        return self.ids[: self.text.count(b",", 0, end) + 1 if end else 0]


class KnownTexts:
    """The arrays that a rollout's prompts began with.

    Only what was parsed before is in it, so it changes how fast an array is read and never what it says.
    """

    def __init__(self, capacity: int = 32 * 2**20) -> None:
        """``capacity`` is in bytes."""
        self._recent: RecentByRollout[_Known] = RecentByRollout(attrgetter("size"), capacity)

    @property
    def held(self) -> int:
        """How many bytes are taken."""
        return self._recent.held

    def read(self, rollout_id: str, text: bytes) -> TokenIds:
        """The ids of a JSON array.

        Raises:
            ValueError: it is not an array of ids.
        """
        if b"e" in text:
            raise ValueError("true and false are not ids, though Python treats them as integers")
        shared = [(known.shared_with(text), known) for known in self._recent.of(rollout_id)]
        end, known = max(shared, key=itemgetter(0), default=(0, None))
        if known is None or not end:
            return TokenIds(orjson.loads(text))
        tail = text[end:]
        if tail == b"]":
            return known.ids_before(end)
        added = orjson.loads(b"[" + tail[1:])
        if not added:
            raise ValueError("a comma before the closing bracket")
        return TokenIds.joined(known.ids_before(end), TokenIds(added))

    def write(self, rollout_id: str, ids: TokenIds) -> bytes:
        """Ids as a JSON array; of those with which a known array begins its text is taken."""
        begun = [known for known in self._recent.of(rollout_id) if ids.startswith(known.ids)]
        if not begun:
            return orjson.dumps(ids.tolist())
        known = max(begun, key=lambda candidate: len(candidate.ids))
        added = orjson.dumps(ids[len(known.ids) :].tolist())
        return known.text if added == b"[]" else b"".join((memoryview(known.text)[:-1], b",", added[1:]))

    def remember(self, rollout_id: str, text: bytes, ids: TokenIds) -> None:
        """Keep an array that ``read`` took, in place of those that it continues."""
        if not ids:
            return  # a comma after its bracket would be no JSON
        ids.buffer()  # joined now, or calls that nobody stores would keep each other's parts
        self._recent.remember(rollout_id, _Known(text, ids), lambda known: not known.is_continued_by(text))
