"""Which stored call a request continues, and the tokens of one call.

Plain SQL, as in ``queries``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from token_id_capture.provenance import HistoryLink, KnownCall, StoredAnswer
from token_id_capture.store.driver import Execute
from token_id_capture.store.sequence_walk import SequenceWalk, damaged
from token_id_capture.tokens import TokenIds

_CHAINS_AT_ONCE: Final = 256
_PART_COLUMNS: Final = (
    "model_call_id",
    "prefix_call_id",
    "prefix_length",
    "prompt_suffix",
    "generation",
    "prompt_length",
    "generation_length",
    "sequence_length",
    "sequence_digest",
)

_CALLS = """
    SELECT h.model_call_id, h.chain, h.reasoning, h.call_ids, h.ended, e.prompt_length, e.rowid
    FROM call_histories AS h
    LEFT JOIN entries AS e ON e.rollout_id = h.rollout_id AND e.model_call_id = h.model_call_id
    WHERE h.rollout_id = :rollout AND h.chain IN ({chains})
"""
_ANSWERS = """
    SELECT rowid, content FROM entries WHERE rollout_id = :rollout AND rowid > :order ORDER BY rowid
"""
_UPSTREAM = """
    SELECT upstream FROM entries
    WHERE rollout_id = :rollout AND rowid = (SELECT max(rowid) FROM entries WHERE rollout_id = :rollout)
"""
_PARTS = """
    WITH RECURSIVE above(call_id, distance) AS (
        SELECT model_call_id, 0 FROM entries WHERE rollout_id = :rollout AND model_call_id = :call
        UNION ALL
        SELECT e.prefix_call_id, above.distance + 1 FROM above
          JOIN entries AS e ON e.rollout_id = :rollout AND e.model_call_id = above.call_id
         WHERE e.prefix_call_id IS NOT NULL)
    SELECT {columns} FROM above
      JOIN entries AS e ON e.rollout_id = :rollout AND e.model_call_id = above.call_id
     ORDER BY above.distance DESC
"""


def find_calls(execute: Execute, rollout_id: str, chains: Sequence[bytes]) -> list[KnownCall]:
    """The calls of an open rollout that are remembered under one of these chains."""
    found: list[KnownCall] = []
    for start in range(0, len(chains), _CHAINS_AT_ONCE):
        some = list(chains[start : start + _CHAINS_AT_ONCE])
        # Few different texts, so that the driver finds them prepared.
        some += some[:1] * ((1 << (len(some) - 1).bit_length()) - len(some))
        names = {f"c{place}": chain for place, chain in enumerate(some)}
        statement = _CALLS.format(chains=", ".join(f":{name}" for name in names))
        for call, chain, reasoning, call_ids, ended, length, order in execute(
            statement, {"rollout": rollout_id, **names}
        ).fetchall():
            found.append(KnownCall(call, HistoryLink(chain, reasoning, call_ids, bool(ended)), length, order))
    return found


def upstream_of(execute: Execute, rollout_id: str) -> str | None:
    """The address of the engine that served the rollout's latest stored call; None if nobody told."""
    row = execute(_UPSTREAM, {"rollout": rollout_id}).fetchone()
    return None if row is None else row[0]


def answers_since(execute: Execute, rollout_id: str, order: int) -> list[StoredAnswer]:
    """The messages of the calls that were stored after ``order``, in the order of their storing."""
    rows = execute(_ANSWERS, {"rollout": rollout_id, "order": order}).fetchall()
    return [StoredAnswer(row[0], message) for row in rows if (message := _message_of(orjson.loads(row[1]))) is not None]


def _message_of(content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    items, index = content["output_items"], content["token_item_index"] or 0
    return items[index] if index < len(items) else None


def sequence_of(execute: Execute, rollout_id: str, model_call_id: str) -> TokenIds | None:
    """The prompt and generation of a call; None if it is not stored.

    Raises:
        CorruptCaptureError: its tokens, or those of a call that it continues, do not match their digest.
    """
    columns = ", ".join(f"e.{column}" for column in _PART_COLUMNS)
    parts = execute(_PARTS.format(columns=columns), {"rollout": rollout_id, "call": model_call_id}).fetchall()
    if not parts:
        return None
    walk = SequenceWalk()
    pieces: list[bytes] = []
    for part in parts:
        row = dict(zip(_PART_COLUMNS, part, strict=True))
        if problem := walk.problem(row):
            raise damaged(rollout_id, row["model_call_id"], problem)
        pieces += row["prompt_suffix"], row["generation"]
    return TokenIds.from_bytes(b"".join(pieces))
