"""The latest sequences of the rollouts that this process is writing, so that the usual prefix test
is a ``memcmp`` and the usual digest reads only new tokens."""

from __future__ import annotations

from typing import Final, TypeAlias

from token_id_capture.recent import RecentByRollout
from token_id_capture.store.codec import KnownSequence, PackedEntry
from token_id_capture.tokens import TokenIds

_OVERHEAD: Final = 512
"""Bytes of the objects around a sequence: of many short ones they are the most."""

_Remembered: TypeAlias = tuple[str, KnownSequence]
"""A sequence, after the incarnation of its rollout."""


class RecentSequences:
    """The latest stored sequences of each rollout.

    It is a shortcut and never the truth: the writer checks that the rollout is still the same
    incarnation before it believes a pointer. Safe to use from several threads.
    """

    def __init__(self, capacity: int = 32 * 2**20) -> None:
        """``capacity`` is in bytes."""
        self._recent: RecentByRollout[_Remembered] = RecentByRollout(_size, capacity)

    def prefix_of(self, rollout_id: str, prompt: TokenIds) -> _Remembered | None:
        """The rollout's incarnation and the longest remembered sequence that ``prompt`` continues."""
        # Longest first: of a chain all match, and comparing each would read the prompt several times.
        longest_first = sorted(self._recent.of(rollout_id), key=_length, reverse=True)
        return next((one for one in longest_first if one[1].is_prefix_of(prompt)), None)

    def sequence_of(self, rollout_id: str, model_call_id: str) -> TokenIds | None:
        """The prompt and generation of a call, if it is remembered."""
        known = (one for _, one in self._recent.of(rollout_id) if one.model_call_id == model_call_id)
        return next((TokenIds.joined(one.prompt, one.generation) for one in known), None)

    def remember(self, incarnation: str, packed: PackedEntry) -> None:
        """Add a call that is stored now."""
        if packed.generation:
            length = packed.columns["sequence_length"]
            sequence = KnownSequence(
                packed.model_call_id, packed.prompt, packed.generation, packed.digest_state, length
            )
            self._recent.remember(packed.rollout_id, (incarnation, sequence), lambda known: known[0] == incarnation)

    def forget(self, rollout_id: str) -> None:
        """Drop what is remembered of a rollout that is frozen or gone."""
        self._recent.forget(rollout_id)


def _length(remembered: _Remembered) -> int:
    return remembered[1].length


def _size(remembered: _Remembered) -> int:
    return TokenIds.itemsize * remembered[1].length + _OVERHEAD
