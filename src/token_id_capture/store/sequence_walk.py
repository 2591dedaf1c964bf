"""The one walk over a rollout's stored tokens that says of each call whether they are as they were captured.

A call whose prompt continues an earlier one is stored without that part, so its digest can only be checked
after the earlier call was read. Each stored token is read once: the running sha256 of a call is copied to
those that continue it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from token_id_capture.errors import CorruptCaptureError

if TYPE_CHECKING:
    from hashlib import _Hash

TOKENS_MISMATCH = "its tokens do not match the digest stored with them"


@dataclass(slots=True)
class _Read:
    """A call that was read: the digest state that has read its whole sequence, and its length in tokens."""

    state: _Hash
    length: int
    sound: bool


class SequenceWalk:
    """Give it every call of a rollout, in the order of ``prompt_length``: a call is always longer than its prefix."""

    def __init__(self) -> None:
        self._read: dict[str, _Read] = {}

    def __len__(self) -> int:
        return len(self._read)

    def problem(self, row: Mapping[str, Any]) -> str:
        """What is wrong with the tokens of this call, in words; empty if nothing is."""
        prefix_id, suffix, generation = row["prefix_call_id"], row["prompt_suffix"], row["generation"]
        prefix = None if prefix_id is None else self._read.get(prefix_id)
        state = hashlib.sha256() if prefix is None else prefix.state.copy()
        state.update(suffix)
        state.update(generation)
        lengths = row["prefix_length"] + len(suffix) // 4, len(generation) // 4
        read = _Read(state, sum(lengths), sound=state.digest() == row["sequence_digest"])
        self._read[row["model_call_id"]] = read
        if prefix_id is not None and (prefix is None or prefix.length != row["prefix_length"]):
            read.sound = False
            return f"its prefix, call {prefix_id}, is missing or has a different length"
        if lengths != (row["prompt_length"], row["generation_length"]) or read.length != row["sequence_length"]:
            return "its lengths do not match its tokens"
        if read.sound:
            return ""
        if prefix is not None and not prefix.sound:
            return f"its prefix, call {prefix_id}, is damaged"
        return TOKENS_MISMATCH


def damaged(rollout_id: str, call_id: str, what: str) -> CorruptCaptureError:
    """The error of a call whose stored tokens or content cannot be trusted."""
    return CorruptCaptureError(
        f"call {call_id!r} of rollout {rollout_id!r} is damaged: {what}. "
        "Do not train on this rollout; run tokcap verify on the database."
    )
