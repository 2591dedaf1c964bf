"""Delete evidence: by proof that exactly this snapshot was delivered, or by an administrator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
from sqlalchemy import Table, and_, bindparam, column, delete, exists, func, select, update

from token_id_capture import reasons
from token_id_capture.lifecycle import Outcome, State
from token_id_capture.store.schema import (
    call_histories,
    call_intents,
    entries,
    incomplete_flags,
    late_writes,
    rollouts,
    snapshot_entries,
    snapshot_flags,
    snapshots,
)
from token_id_capture.store.write.queue import Batch
from token_id_capture.store.write.snapshot import NewOutcome, append_outcome, latest_head, latest_outcome
from token_id_capture.store.write.statements import Statement, run_all

Changed = dict[str, list[str]]


@dataclass(slots=True, frozen=True)
class Drop:
    """Retire a rollout if this is its latest snapshot."""

    rollout_id: str
    snapshot_id: str
    version: int


@dataclass(slots=True, frozen=True)
class Removal:
    """Retire or delete rollouts whatever their state; the reason is kept in the audit trail."""

    rollout_ids: tuple[str, ...]
    keep_tombstone: bool


def _listed() -> Any:
    return select(column("value")).select_from(func.json_each(bindparam("rollout_ids")))


def _listed_snapshots() -> Any:
    return select(snapshots.c.snapshot_id).where(snapshots.c.rollout_id.in_(_listed()))


def _of_listed(table: Table) -> Statement:
    return Statement(delete(table).where(table.c.rollout_id.in_(_listed())))


# Copies before their snapshot, and everything before the rollout that it refers to.
_DELETE_CONTENT = (
    Statement(delete(snapshot_entries).where(snapshot_entries.c.snapshot_id.in_(_listed_snapshots()))),
    Statement(delete(snapshot_flags).where(snapshot_flags.c.snapshot_id.in_(_listed_snapshots()))),
    _of_listed(snapshots),
    _of_listed(entries),
    _of_listed(incomplete_flags),
    _of_listed(call_intents),
    _of_listed(call_histories),
)
_DELETE_LATE_WRITES = _of_listed(late_writes)
_DELETE_ROLLOUTS = _of_listed(rollouts)
_RETIRE = Statement(
    update(rollouts)
    .where(rollouts.c.rollout_id.in_(_listed()))
    .values(state=State.RETIRED.value, retired_at=bindparam("now"), version=rollouts.c.version + bindparam("raised"))
)
_SELECT_ROLLOUT = Statement(
    select(rollouts.c.state, rollouts.c.version, rollouts.c.snapshot_id).where(
        rollouts.c.rollout_id == bindparam("rollout")
    )
)
_SELECT_LISTED = Statement(
    select(rollouts.c.rollout_id, rollouts.c.state, rollouts.c.version, rollouts.c.snapshot_id).where(
        rollouts.c.rollout_id.in_(_listed())
    )
)
_OLD_TOMBSTONES = and_(rollouts.c.state == State.RETIRED, rollouts.c.retired_at < bindparam("before"))
_SWEEP_LATE_WRITES = Statement(
    delete(late_writes).where(exists().where(rollouts.c.rollout_id == late_writes.c.rollout_id, _OLD_TOMBSTONES))
)
_SWEEP_ROLLOUTS = Statement(delete(rollouts).where(_OLD_TOMBSTONES))


def drop(batch: Batch, wanted: Drop) -> bool:
    """Compare and delete, in the transaction of the batch."""
    row = _SELECT_ROLLOUT.row(batch.connection, {"rollout": wanted.rollout_id})
    if row is None or not wanted.snapshot_id or row[1:] != (wanted.version, wanted.snapshot_id):
        return False
    state = row[0]
    if state == State.RETIRED:
        return True
    # A mark raises the rollout's version; until the next freeze no snapshot has it, and nobody saw it.
    head = latest_head(batch, wanted.snapshot_id)
    if (
        state != State.FROZEN
        or head is None
        or head.version != wanted.version
        or _is_evidence(batch, wanted.snapshot_id)
    ):
        return False
    _retire(batch, [wanted.rollout_id])
    return True


def remove(batch: Batch, removal: Removal) -> Changed:
    """Retire or delete the listed rollouts; the answer lists those changed and those left as they were."""
    found = {row[0]: row[1:] for row in _SELECT_LISTED.rows(batch.connection, _ids(removal.rollout_ids))}
    changed = [
        rollout_id
        for rollout_id in removal.rollout_ids
        if rollout_id in found and not (removal.keep_tombstone and found[rollout_id][0] == State.RETIRED)
    ]
    for rollout_id in changed:
        _, version, snapshot_id = found[rollout_id]
        if snapshot_id is not None and _is_evidence(batch, snapshot_id):
            # The trigger that keeps masked and failed evidence lets a released snapshot go.
            reason = reasons.RETIRED_BY_HAND if removal.keep_tombstone else reasons.DELETED_BY_HAND
            append_outcome(batch, rollout_id, NewOutcome(snapshot_id, version, Outcome.RELEASED, reason, "{}"))
    if removal.keep_tombstone:
        # The version is raised: a drop must not be told that it had succeeded.
        _retire(batch, changed, raised=1)
    else:
        run_all(batch.connection, (*_DELETE_CONTENT, _DELETE_LATE_WRITES, _DELETE_ROLLOUTS), _ids(changed))
    return {"removed": changed, "absent": [name for name in removal.rollout_ids if name not in set(changed)]}


def sweep_retired(batch: Batch, older_than_seconds: float) -> int:
    """Remove the tombstones of rollouts retired longer ago than this; the answer is their number."""
    parameters = {"before": batch.now - older_than_seconds}
    _SWEEP_LATE_WRITES.run(batch.connection, parameters)
    return _SWEEP_ROLLOUTS.run(batch.connection, parameters)


def _is_evidence(batch: Batch, snapshot_id: str) -> bool:
    return (latest := latest_outcome(batch, snapshot_id)) is not None and latest.keeps_evidence


def _retire(batch: Batch, rollout_ids: list[str], *, raised: int = 0) -> None:
    parameters = {**_ids(rollout_ids), "now": batch.now, "raised": raised}
    run_all(batch.connection, (*_DELETE_CONTENT, _RETIRE), parameters)


def _ids(rollout_ids: Any) -> dict[str, str]:
    return {"rollout_ids": orjson.dumps(list(rollout_ids)).decode()}
