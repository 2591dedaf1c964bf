"""What is read of single rollouts: a summary, all but the tokens, and the stored calls.

Plain SQL, so that a command that only looks needs the driver and nothing else. Each function takes
what runs a statement: ``execute`` of a connection of the driver, or of SQLAlchemy,
which takes the same text and names. So nothing here is a word of one database alone, except ``rowid``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from token_id_capture.errors import CorruptCaptureError, UnknownRolloutError
from token_id_capture.lifecycle import (
    CALL_FIELDS,
    ORIGIN_FIELDS,
    BuildOutcome,
    CallOrigin,
    Flag,
    Intent,
    IntentOutcome,
    LateWrite,
    Outcome,
    Purpose,
    State,
)
from token_id_capture.store.driver import Execute, Result
from token_id_capture.store.outcome_order import OLDEST_FIRST
from token_id_capture.store.read.summaries import (
    CallSummary,
    RolloutDetail,
    RolloutSummary,
)

Rows = list[dict[str, Any]]

SUMMARIES: Final = """
    SELECT o.rollout_id, o.state, o.version, o.snapshot_id, o.calls, o.longest_prompt, o.generated_tokens,
           o.flags, o.open_calls, o.latest_outcome, o.latest_reason, r.opened_at, o.agents, o.latest_causes
    FROM rollouts AS r JOIN rollout_overview AS o ON o.rollout_id = r.rollout_id
"""
"""The fields of ``RolloutSummary``. Of entries, an index is all that it reads."""

ENTRY_ROW: Final = (
    *("model_call_id", "payload_digest", "sequence_digest", "prefix_call_id", "prefix_length", "prompt_length"),
    *("generation_length", "sequence_length", "schema_version", "model", "finish_reason", "created_at"),
    *("content", "extras", "prompt_suffix", "generation", "log_probs", "routed_experts"),
    *ORIGIN_FIELDS,
    "upstream",
)
"""The columns that ``codec`` reads of an entry."""
_ENTRY: Final = ", ".join(ENTRY_ROW)

_SUMMARY = f"{SUMMARIES} WHERE r.rollout_id = :rollout"
_LISTED = f"{SUMMARIES} WHERE r.rollout_id IN (SELECT value FROM json_each(:rollouts)) ORDER BY r.rollout_id"
_ORIGIN: Final = ", ".join(CALL_FIELDS)
_ORIGIN_WIDTH: Final = len(CALL_FIELDS)
_CALLS = f"""
    SELECT model_call_id, prefix_call_id, prefix_length, prompt_length, generation_length, model, finish_reason,
           created_at, upstream,
           coalesce(nullif(json_extract(extras, '$.continuity.reason'), ''),
                    json_extract(extras, '$.continuity.mode')),
           {", ".join(ORIGIN_FIELDS)}, json_extract(extras, '$.session_headers')
    FROM entries WHERE rollout_id = :rollout ORDER BY rowid
"""
_FLAGS = f"""
    SELECT model_call_id, reason, detail, flagged_at, {_ORIGIN}
    FROM incomplete_flags WHERE rollout_id = :rollout ORDER BY flag_id
"""
_SNAPSHOT_FLAGS = f"""
    SELECT model_call_id, reason, detail, flagged_at, {_ORIGIN}
    FROM snapshot_flags WHERE snapshot_id = :snapshot AND version = :version ORDER BY snapshot_flag_id
"""
_INTENTS = f"""
    SELECT i.model_call_id, i.outcome, i.detail, i.begun_at, w.pid, w.host,
           {", ".join(f"i.{name}" for name in CALL_FIELDS)}
    FROM call_intents AS i JOIN writers AS w ON w.writer_id = i.writer_id
    WHERE i.rollout_id = :rollout ORDER BY i.rowid
"""
# Outcomes outlive a rollout; those of an earlier use of its id say nothing about this one.
_OUTCOMES = f"""
    SELECT version, outcome, reason, metrics, recorded_at FROM build_outcomes
    WHERE snapshot_id = :snapshot ORDER BY {OLDEST_FIRST}
"""
_LATE_WRITES = """
    SELECT model_call_id, state, attempted_at FROM late_writes WHERE rollout_id = :rollout ORDER BY rowid
"""
# Found by rowid, in whose order they come: to be sorted, rows as wide as these are copied once more.
_ENTRIES = f"""
    SELECT {_ENTRY} FROM entries WHERE rowid IN (SELECT rowid FROM entries WHERE rollout_id = :rollout) ORDER BY rowid
"""
# A call and the calls that its prompt is stored behind.
_WITH_PREFIXES = f"""
    WITH RECURSIVE needed (call) AS (
        SELECT model_call_id FROM entries WHERE rollout_id = :rollout AND model_call_id = :call
        UNION
        SELECT e.prefix_call_id FROM entries AS e JOIN needed ON e.model_call_id = needed.call
        WHERE e.rollout_id = :rollout AND e.prefix_call_id IS NOT NULL
    )
    SELECT {_ENTRY} FROM entries WHERE rollout_id = :rollout AND model_call_id IN (SELECT call FROM needed)
"""
_OF_SNAPSHOT = "WHERE snapshot_id = :snapshot AND version = :version"
_SNAPSHOT_ENTRIES = f"""
    SELECT {_ENTRY} FROM snapshot_entries
    WHERE rowid IN (SELECT rowid FROM snapshot_entries {_OF_SNAPSHOT}) ORDER BY rowid
"""
_SNAPSHOT = f"""
    SELECT rollout_id, entry_count, incomplete, EXISTS (SELECT 1 FROM snapshot_flags {_OF_SNAPSHOT})
    FROM snapshots {_OF_SNAPSHOT}
"""


def unknown(rollout_id: str) -> UnknownRolloutError:
    """The error for a rollout that should exist and does not."""
    return UnknownRolloutError(
        f"no rollout {rollout_id!r} is in this database: check the id (tokcap ls lists them) and --database"
    )


def summaries_of(execute: Execute, rollout_ids: Sequence[str]) -> list[RolloutSummary]:
    """Those of the rollouts that there are, in the order of their ids."""
    listed = {"rollouts": json.dumps(list(rollout_ids))}
    return [rollout_summary(row) for row in execute(_LISTED, listed).fetchall()]


def describe_rollout(execute: Execute, rollout_id: str) -> RolloutDetail:
    """One rollout in full, without its tokens.

    Raises:
        UnknownRolloutError: it is not in the database.
    """
    row = execute(_SUMMARY, {"rollout": rollout_id}).fetchone()
    if row is None:
        raise unknown(rollout_id)
    summary = rollout_summary(row)
    return RolloutDetail(
        summary=summary,
        calls=tuple(_call(*row) for row in execute(_CALLS, {"rollout": rollout_id}).fetchall()),
        flags=flags(execute, rollout_id),
        intents=intents(execute, rollout_id),
        outcomes=outcomes(execute(_OUTCOMES, {"snapshot": summary.snapshot_id})),
        late_writes=late_writes(execute, rollout_id),
    )


def rollout_summary(row: Sequence[Any]) -> RolloutSummary:
    """What a row of ``SUMMARIES`` says."""
    found = RolloutSummary(*row)
    return replace(found, state=State(found.state), outcome=None if found.outcome is None else Outcome(found.outcome))


def outcomes(found: Result) -> tuple[BuildOutcome, ...]:
    """The outcomes of rows of version, outcome, reason, metrics and time."""
    return tuple(
        BuildOutcome(version, Outcome(outcome), reason, json.loads(metrics), recorded_at)
        for version, outcome, reason, metrics, recorded_at in found.fetchall()
    )


def flags(execute: Execute, rollout_id: str) -> tuple[Flag, ...]:
    """Why the rollout is incomplete, in the order in which that was noticed."""
    return tuple(_flag(*row) for row in execute(_FLAGS, {"rollout": rollout_id}).fetchall())


def snapshot_flags(execute: Execute, snapshot_id: str, version: int) -> tuple[Flag, ...]:
    """Why a snapshot is incomplete; calls that had not ended are among it."""
    found = execute(_SNAPSHOT_FLAGS, {"snapshot": snapshot_id, "version": version})
    return tuple(_flag(*row) for row in found.fetchall())


def intents(execute: Execute, rollout_id: str) -> tuple[Intent, ...]:
    """Its calls of which no entry is stored, in the order in which they began."""
    return tuple(_intent(*row) for row in execute(_INTENTS, {"rollout": rollout_id}).fetchall())


def late_writes(execute: Execute, rollout_id: str) -> tuple[LateWrite, ...]:
    """What came too late, in the order in which it came."""
    return tuple(_late_write(*row) for row in execute(_LATE_WRITES, {"rollout": rollout_id}).fetchall())


def _call(*row: Any) -> CallSummary:
    return replace(CallSummary(*row[:-_ORIGIN_WIDTH]), origin=_origin(*row[-_ORIGIN_WIDTH:]))


def _flag(*row: Any) -> Flag:
    return replace(Flag(*row[:-_ORIGIN_WIDTH]), origin=_origin(*row[-_ORIGIN_WIDTH:]))


def _intent(model_call_id: str, outcome: str | None, *rest: Any) -> Intent:
    known = None if outcome is None else IntentOutcome(outcome)
    return replace(Intent(model_call_id, known, *rest[:-_ORIGIN_WIDTH]), origin=_origin(*rest[-_ORIGIN_WIDTH:]))


def _origin(
    agent: str | None, parent: str | None, purpose: str | None, offers_tools: int | None, headers: str | None
) -> CallOrigin:
    return CallOrigin(
        agent,
        parent,
        None if purpose is None else Purpose(purpose),
        None if offers_tools is None else bool(offers_tools),
        None if headers is None else json.loads(headers),
    )


def _late_write(model_call_id: str, state: str, attempted_at: float) -> LateWrite:
    return LateWrite(model_call_id, State(state), attempted_at)


def entry_rows(execute: Execute, rollout_id: str) -> Rows:
    """The rows of a rollout's entries, in the order in which they were stored."""
    return _as_dicts(execute(_ENTRIES, {"rollout": rollout_id}))


def rows_of_call(execute: Execute, rollout_id: str, model_call_id: str) -> Rows:
    """The row of a call and those of all calls that its prompt is stored behind; empty if it is not stored."""
    return _as_dicts(execute(_WITH_PREFIXES, {"rollout": rollout_id, "call": model_call_id}))


def snapshot_rows(execute: Execute, snapshot_id: str, version: int) -> Rows | None:
    """The rows of a snapshot's entries, in the order in which they were stored; None if it is not stored any more.

    Raises:
        CorruptCaptureError: it does not hold what was copied into it.
    """
    head = execute(_SNAPSHOT, {"snapshot": snapshot_id, "version": version}).fetchone()
    if head is None:
        return None
    rollout_id, entry_count, incomplete, flagged = head
    rows = _as_dicts(execute(_SNAPSHOT_ENTRIES, {"snapshot": snapshot_id, "version": version}))
    if len(rows) != entry_count or bool(incomplete) != bool(flagged):
        raise CorruptCaptureError(
            f"version {version} of the snapshot of rollout {rollout_id!r} is damaged: it holds {len(rows)} calls of "
            f"{entry_count}, and says incomplete = {incomplete} with{'' if flagged else 'out'} flags. "
            "Do not train on this rollout; run tokcap verify on the database."
        )
    return rows


def snapshot(execute: Execute, snapshot_id: str, version: int) -> tuple[Rows, tuple[Flag, ...]] | None:
    """The rows of a snapshot's entries and its flags; None if it is not stored any more.

    Both come from one call, so that they are of one state: entries whose flags were deleted meanwhile would
    look complete.

    Raises:
        CorruptCaptureError: it does not hold what was copied into it.
    """
    rows = snapshot_rows(execute, snapshot_id, version)
    return None if rows is None else (rows, snapshot_flags(execute, snapshot_id, version))


def _as_dicts(result: Result) -> Rows:
    return [dict(zip(ENTRY_ROW, row, strict=True)) for row in result.fetchall()]
