"""The latest sequences of the rollouts that this process is writing, so that the usual prefix test
is a ``memcmp`` and the usual digest reads only new tokens."""

from __future__ import annotations

import threading
from collections import OrderedDict
from operator import attrgetter
from typing import Final

from token_id_capture.store.codec import KnownSequence, PackedEntry
from token_id_capture.tokens import TokenIds

_BYTES_PER_TOKEN: Final = 4
_SEQUENCES_PER_ROLLOUT: Final = 4
_OVERHEAD: Final = 512
"""Bytes of the objects around a sequence: of many short ones they are the most."""


class RecentSequences:
    """A bounded, least-recently-used map from a rollout to its latest stored sequences.

    It is a shortcut and never the truth: the writer checks that the rollout is still the same
    incarnation before it believes a pointer. Safe to use from several threads.
    """

    def __init__(self, capacity: int = 32 * 2**20) -> None:
        """``capacity`` is in bytes."""
        self._capacity = capacity
        self._held = 0
        self._rollouts: OrderedDict[str, tuple[str, list[KnownSequence]]] = OrderedDict()
        self._lock = threading.Lock()

    def prefix_of(self, rollout_id: str, prompt: TokenIds) -> tuple[str, KnownSequence] | None:
        """The rollout's incarnation and the longest remembered sequence that ``prompt`` continues."""
        with self._lock:
            known = self._rollouts.get(rollout_id)
            if known is None:
                return None
            self._rollouts.move_to_end(rollout_id)
            incarnation, sequences = known
        # Longest first: of a chain all match, and comparing each would read the prompt several times.
        for sequence in sorted(sequences, key=attrgetter("length"), reverse=True):
            if sequence.is_prefix_of(prompt):
                return incarnation, sequence
        return None

    def sequence_of(self, rollout_id: str, model_call_id: str) -> TokenIds | None:
        """The prompt and generation of a call, if it is remembered."""
        with self._lock:
            _, sequences = self._rollouts.get(rollout_id, ("", []))
        return next(
            (TokenIds.joined(one.prompt, one.generation) for one in sequences if one.model_call_id == model_call_id),
            None,
        )

    def remember(self, incarnation: str, packed: PackedEntry) -> None:
        """Add a call that is stored now."""
        if not packed.generation:
            return
        length = packed.columns["sequence_length"]
        sequence = KnownSequence(packed.model_call_id, packed.prompt, packed.generation, packed.digest_state, length)
        with self._lock:
            held_incarnation, sequences = self._rollouts.pop(packed.rollout_id, (incarnation, []))
            kept = sequences[-(_SEQUENCES_PER_ROLLOUT - 1) :] if held_incarnation == incarnation else []
            self._rollouts[packed.rollout_id] = incarnation, [*kept, sequence]
            self._held += _size([sequence]) - _size(sequences[: len(sequences) - len(kept)])
            while self._held > self._capacity and len(self._rollouts) > 1:
                self._held -= _size(self._rollouts.popitem(last=False)[1][1])

    def forget(self, rollout_id: str) -> None:
        """Drop what is remembered of a rollout that is frozen or gone."""
        with self._lock:
            known = self._rollouts.pop(rollout_id, None)
            if known is not None:
                self._held -= _size(known[1])


def _size(sequences: list[KnownSequence]) -> int:
    return sum(_BYTES_PER_TOKEN * sequence.length + _OVERHEAD for sequence in sequences)
