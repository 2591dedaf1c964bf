"""The index key of a call that Gym stamped, and Gym's lineage fields for calls that were captured without them.

Our gateway stores no lineage: a parent is the call whose tokens the prompt provably continues. Gym's
builder reads parents from the entries, so they are stamped when a rollout is frozen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final

from token_id_capture.builder.call_forest import CallForest
from token_id_capture.integrations.nemo_gym.entries import digest_of, has_lineage
from token_id_capture.provenance import HistoryLink
from token_id_capture.records import TokenEntry

_KEYS: Final = b"nemo-gym-lineage"


def history_of(fingerprint: str) -> HistoryLink:
    """The index row of a call with this ``continuation_fingerprint``.

    The key is of another kind than those of our gateway's continuity and never meets one of them.
    """
    chain = hashlib.sha256(_KEYS + fingerprint.encode()).digest()[:16]
    return HistoryLink(chain=chain, reasoning=b"", call_ids=b"", ended=True)


def stamps(entries: Sequence[TokenEntry]) -> dict[str, dict[str, Any]]:
    """Lineage fields by call id, for those entries that carry none.

    A call is the child of the longest earlier sequence that its prompt begins with, else a root.
    """
    bare = [entry for entry in entries if not has_lineage(entry)]
    if not bare:
        return {}
    parents = _parents(entries)
    return {entry.model_call_id: _stamp(entry, parents.get(entry.model_call_id)) for entry in bare}


def _parents(entries: Sequence[TokenEntry]) -> dict[str, str]:
    """The proven parent of each call that has one."""
    forest = CallForest()
    generated = [entry for entry in entries if entry.generation_token_ids]
    for entry in sorted(generated, key=lambda entry: (len(entry.prompt_token_ids), entry.model_call_id)):
        forest.add(entry)
    placed = {call.call_id: call for call in forest.calls} | forest.copies
    return {call_id: call.parent.call_id for call_id, call in placed.items() if call.parent is not None}


def _stamp(entry: TokenEntry, parent: str | None) -> dict[str, Any]:
    return {
        "parent_call_id": parent,
        "parent_resolution": "root" if parent is None else "resolved",
        "cum_len": len(entry.prompt_token_ids) + len(entry.generation_token_ids),
        "digest": digest_of(entry),
    }
