"""Freeze a rollout: copy its rows into an immutable snapshot, in one transaction."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Final

from sqlalchemy import bindparam, delete, insert, literal, select, text, update

from token_id_capture import reasons
from token_id_capture.errors import CorruptCaptureError, RolloutRetiredError, UnknownRolloutError
from token_id_capture.lifecycle import CALL_FIELDS, Outcome, State
from token_id_capture.store.outcome_order import NEWEST_FIRST
from token_id_capture.store.schema import (
    ENTRY_COLUMNS,
    build_outcomes,
    call_histories,
    call_intents,
    entries,
    incomplete_flags,
    rollouts,
    snapshot_entries,
    snapshot_flags,
    snapshots,
    writers,
)
from token_id_capture.store.write.queue import Batch
from token_id_capture.store.write.statements import Statement, remote, run_all

RECORDED_BY_CONSUMERS: Final = (Outcome.DELIVERED, Outcome.MASKED, Outcome.FAILED)


@dataclass(slots=True, frozen=True)
class SnapshotHead:
    """A snapshot without its entries."""

    rollout_id: str
    snapshot_id: str
    version: int
    incomplete: bool


@dataclass(slots=True, frozen=True)
class NewOutcome:
    """An outcome to append; ``metrics`` is JSON."""

    snapshot_id: str
    version: int
    outcome: Outcome
    reason: str
    metrics: str


_SELECT_ROLLOUT = Statement(
    select(rollouts.c.state, rollouts.c.version, rollouts.c.snapshot_id).where(
        rollouts.c.rollout_id == bindparam("rollout")
    )
)
_SELECT_HEAD = Statement(
    select(snapshots.c.rollout_id, snapshots.c.snapshot_id, snapshots.c.version, snapshots.c.incomplete)
    .where(snapshots.c.snapshot_id == bindparam("snapshot"))
    .order_by(snapshots.c.version.desc())
    .limit(1)
)
_SELECT_ROLLOUT_OF = Statement(
    select(snapshots.c.rollout_id).where(
        snapshots.c.snapshot_id == bindparam("snapshot"), snapshots.c.version == bindparam("at_version")
    )
)
_FREEZE_ROLLOUT = Statement(
    update(rollouts)
    .where(rollouts.c.rollout_id == bindparam("rollout"))
    .values(
        state=State.FROZEN.value,
        version=bindparam("to_version"),
        snapshot_id=bindparam("snapshot"),
        frozen_at=bindparam("now"),
    )
)
COPY_ENTRIES = Statement(
    insert(snapshot_entries).from_select(
        ["snapshot_id", "version", *ENTRY_COLUMNS],
        # Found by rowid, in whose order they come: to be sorted, rows as wide as these are copied once more.
        select(bindparam("snapshot"), bindparam("to_version"), *(entries.c[name] for name in ENTRY_COLUMNS))
        .where(text("rowid IN (SELECT rowid FROM entries WHERE rollout_id = :rollout)"))
        .order_by(text("rowid")),
    )
)
COPY_FLAGS = Statement(
    insert(snapshot_flags).from_select(
        ["snapshot_id", "version", "model_call_id", "reason", "detail", "flagged_at", *CALL_FIELDS],
        select(
            bindparam("snapshot"),
            bindparam("to_version"),
            incomplete_flags.c.model_call_id,
            incomplete_flags.c.reason,
            incomplete_flags.c.detail,
            incomplete_flags.c.flagged_at,
            *(incomplete_flags.c[name] for name in CALL_FIELDS),
        )
        .where(incomplete_flags.c.rollout_id == bindparam("rollout"))
        .order_by(incomplete_flags.c.flag_id),
    )
)
COPY_OPEN_INTENTS = Statement(
    insert(snapshot_flags).from_select(
        ["snapshot_id", "version", "model_call_id", "reason", "detail", "flagged_at", *CALL_FIELDS],
        select(
            bindparam("snapshot"),
            bindparam("to_version"),
            call_intents.c.model_call_id,
            literal(reasons.CALL_LOST),
            text(
                "coalesce('begun by process ' || writers.pid || ' on ' || writers.host, 'begun by an unknown process')"
            ),
            bindparam("now"),
            *(call_intents.c[name] for name in CALL_FIELDS),
        )
        # Outer: a call is lost even if its process is no longer found.
        .outerjoin(writers, writers.c.writer_id == call_intents.c.writer_id)
        .where(call_intents.c.rollout_id == bindparam("rollout"), call_intents.c.outcome.is_(None)),
    )
)
# Calls in their table, as they are copied, and in both indexes that lead to them: damage to one leaves the others as
# they were. Open intents have one index, so the newest rows are read without it; only so many, as no freeze may take
# longer the more rollouts a file holds.
_COUNT_ROWS: Final = ", ".join(
    f"(SELECT count(*) FROM {rows} WHERE {condition})"
    for rows, condition in (
        ("entries", "rowid IN (SELECT rowid FROM entries WHERE rollout_id = :rollout) AND +rollout_id = :rollout"),
        ("entries INDEXED BY sqlite_autoindex_entries_1", "rollout_id = :rollout"),
        ("entries INDEXED BY entries_by_length", "rollout_id = :rollout"),
        ("incomplete_flags INDEXED BY incomplete_flags_by_rollout", "rollout_id = :rollout"),
        ("call_intents INDEXED BY sqlite_autoindex_call_intents_1", "rollout_id = :rollout AND outcome IS NULL"),
        (
            "(SELECT rollout_id, outcome FROM call_intents NOT INDEXED ORDER BY rowid DESC LIMIT 256)",
            "rollout_id = :rollout AND outcome IS NULL",
        ),
    )
)
_FORGET_HISTORIES = Statement(delete(call_histories).where(call_histories.c.rollout_id == bindparam("rollout")))
_INSERT_HEAD = Statement(insert(snapshots))
_SELECT_OUTCOME = Statement(
    select(build_outcomes.c.outcome)
    .where(build_outcomes.c.snapshot_id == bindparam("snapshot"))
    .order_by(text(NEWEST_FIRST))
    .limit(1)
)
_SELECT_OUTCOME_ON = Statement(
    select(build_outcomes.c.outcome, build_outcomes.c.reason)
    .where(build_outcomes.c.snapshot_id == bindparam("snapshot"), build_outcomes.c.version == bindparam("at_version"))
    .order_by(text(NEWEST_FIRST))
    .limit(1)
)
_INSERT_OUTCOME = Statement(
    insert(build_outcomes),
    ["snapshot_id", "version", "rollout_id", "outcome", "reason", "metrics", "recorded_at"],
)


def freeze(batch: Batch, rollout_id: str) -> SnapshotHead | None:
    """Freeze, or find the snapshot that stands; None for a rollout that nobody has seen.

    Raises:
        RolloutRetiredError: the rollout was retired.
        CorruptCaptureError: a damaged index hides a call, a flag or an open intent of it.
    """
    row = _SELECT_ROLLOUT.row(batch.connection, {"rollout": rollout_id})
    if row is None:
        return None
    state, version, snapshot_id = row
    if state == State.RETIRED:
        raise RolloutRetiredError(rollout_id, "a freeze")
    if state == State.FROZEN:
        head = latest_head(batch, snapshot_id)
        if head is not None and head.version == version:
            return head
        # A mark has raised the version since: the same snapshot gets a new, immutable row.
        return _copy(batch, rollout_id, snapshot_id, version)
    return _copy(batch, rollout_id, uuid.uuid4().hex, version + 1)


def _copy(batch: Batch, rollout_id: str, snapshot_id: str, version: int) -> SnapshotHead:
    _check_indexes(batch, rollout_id, version - 1)
    parameters = {"rollout": rollout_id, "snapshot": snapshot_id, "to_version": version, "now": batch.now}
    connection = batch.connection
    # The copies come before the head, which seals them.
    entry_count, *flag_counts = run_all(connection, (COPY_ENTRIES, COPY_FLAGS, COPY_OPEN_INTENTS), parameters)
    head = SnapshotHead(rollout_id, snapshot_id, version, sum(flag_counts) > 0)
    values = {
        "snapshot_id": snapshot_id,
        "version": version,
        "rollout_id": rollout_id,
        "incomplete": int(head.incomplete),
        "entry_count": entry_count,
        "frozen_at": batch.now,
    }
    run_all(connection, (_INSERT_HEAD, _FREEZE_ROLLOUT, _FORGET_HISTORIES), {**parameters, **values})
    return head


def _check_indexes(batch: Batch, rollout_id: str, flags: int) -> None:
    """Look for a call, a flag or an open intent that a damaged index hides: the rollout would pass as complete.

    ``flags`` is how many were set: each has raised the rollout's version by one. A server's pages are its own to check.
    """
    if remote(batch.connection):
        return
    rows, one, other, found, known, seen = batch.connection.execute(
        f"SELECT {_COUNT_ROWS}", {"rollout": rollout_id}
    ).fetchone()
    if not rows == one == other or found != flags or seen > known:
        raise CorruptCaptureError(
            f"rollout {rollout_id!r} was not frozen: its indexes show {one} and {other} calls, {rows} of them found, "
            f"{found} of {flags} flags and {known} of at least {seen} open intents. So an index is damaged: stop the "
            "servers and let sqlite3 rebuild the indexes (REINDEX), or continue from a backup; tokcap verify finds "
            "what else is damaged."
        )


def latest_head(batch: Batch, snapshot_id: str) -> SnapshotHead | None:
    """The newest version of a snapshot, without its entries."""
    row = _SELECT_HEAD.row(batch.connection, {"snapshot": snapshot_id})
    return None if row is None else SnapshotHead(row[0], row[1], row[2], bool(row[3]))


def latest_outcome(batch: Batch, snapshot_id: str) -> Outcome | None:
    """What the outcome that counts says of a snapshot, or None."""
    row = _SELECT_OUTCOME.row(batch.connection, {"snapshot": snapshot_id})
    return None if row is None else Outcome(row[0])


def record_outcome(batch: Batch, outcome: NewOutcome) -> None:
    """Append an outcome, unless it repeats the latest one on this version.

    Raises:
        UnknownRolloutError: no snapshot has this id and version.
    """
    wanted = {"snapshot": outcome.snapshot_id, "at_version": outcome.version}
    head = _SELECT_ROLLOUT_OF.row(batch.connection, wanted)
    if head is None:
        raise UnknownRolloutError(
            f"no snapshot {outcome.snapshot_id!r} of version {outcome.version}: it was retired, or never taken"
        )
    if _SELECT_OUTCOME_ON.row(batch.connection, wanted) != (outcome.outcome, outcome.reason):
        append_outcome(batch, head[0], outcome)


def append_outcome(batch: Batch, rollout_id: str, outcome: NewOutcome) -> None:
    """Append an outcome as it is."""
    values = {
        "snapshot_id": outcome.snapshot_id,
        "version": outcome.version,
        "rollout_id": rollout_id,
        "outcome": outcome.outcome,
        "reason": outcome.reason,
        "metrics": outcome.metrics,
        "recorded_at": batch.now,
    }
    _INSERT_OUTCOME.run(batch.connection, values)
