"""What ``--continuity`` did for a rollout, or would have done. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from token_id_capture import reasons
from token_id_capture.builder.causes import Cause
from token_id_capture.provenance import Mode
from token_id_capture.records import TokenEntry

_KEPT: Final = "tokcap serve --continuity would have kept this rollout one sequence"
_PREVENTED: Final = frozenset({Cause.RETOKENIZATION, Cause.DROPPED_REASONING})
_PERHAPS: Final = frozenset({Cause.EDITED_HISTORY})


def continuity_notes(entries: Sequence[TokenEntry], causes: Collection[Cause]) -> Iterator[str]:
    """Sentences on the prompts of these calls; ``causes`` are those by which the rollout falls apart."""
    made = [entry.continuity for entry in entries if entry.continuity is not None]
    if not made:
        yield from _would_have_kept(causes)
        return
    policy, modes = made[0].policy, Counter(one.mode for one in made)
    sent = (
        f"{modes[Mode.SPLICED]} got the exact tokens of the call that they continue, {modes[Mode.CLEAN]} needed none, "
        f"and {modes[Mode.PLAIN]} got the template's prompt"
    )
    yield f"With --continuity {policy}, of {len(made)} calls {sent}."
    doubts = Counter(one.reason for one in made if one.mode is Mode.PLAIN and one.reason != reasons.FIRST)
    for reason, count in doubts.items():
        sentence = reasons.CONTINUITY_REASONS.get(reason, "")
        yield f"The template's prompt was sent for {reason} ({count}): {sentence}"


def _would_have_kept(causes: Collection[Cause]) -> Iterator[str]:
    if causes and _PREVENTED.issuperset(causes):
        yield f"{_KEPT}: it sends the tokens that were sampled."
    elif causes and (_PREVENTED | _PERHAPS).issuperset(causes):
        yield (
            f"{_KEPT} if only reasoning, white space or the writing of arguments changed: it sends the tokens that "
            "were sampled."
        )
