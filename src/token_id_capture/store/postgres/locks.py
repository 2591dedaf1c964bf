"""The rows that a group locks before it does anything: those of its rollouts, in the order of their ids.

Everything about a rollout is written under the lock on its row, so what writers, freezes and retirements read of it
stays true until they commit. One statement takes all locks of a group, in one order everywhere, and makes the rows
that are missing on its way; so no two groups wait for each other.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Final

import orjson

from token_id_capture.store.write.entries import Call, Mark, Put, begin_calls
from token_id_capture.store.write.queue import Batch, Job
from token_id_capture.store.write.retirement import Drop, Removal
from token_id_capture.store.write.snapshot import NewOutcome

# A row that is in conflict is locked also where the condition of its update is false, as PostgreSQL documents
# (https://www.postgresql.org/docs/current/sql-insert.html), and then it is not written.
_LOCK: Final = """
    INSERT INTO rollouts (rollout_id, incarnation, state, version, opened_at)
    SELECT wanted.rollout_id, wanted.incarnation, 'open', 0, :now
    FROM unnest(:ids::text[], :incarnations::text[], :new::integer[]) AS wanted (rollout_id, incarnation, new)
    WHERE wanted.new = 1 OR EXISTS (SELECT 1 FROM rollouts AS r WHERE r.rollout_id = wanted.rollout_id)
    ORDER BY wanted.rollout_id COLLATE "C"
    ON CONFLICT (rollout_id) DO UPDATE SET version = rollouts.version WHERE false
    RETURNING rollout_id
"""
_OLD_TOMBSTONES: Final = "SELECT rollout_id FROM rollouts WHERE state = 'retired' AND retired_at < :before"
_OF_SNAPSHOTS: Final = """
    SELECT DISTINCT rollout_id FROM snapshots WHERE snapshot_id IN (SELECT value FROM json_each(:snapshots))
"""


def lock_rollouts(batch: Batch, jobs: Iterable[Job]) -> None:
    """Lock the rollouts of these jobs until the end of the transaction, and open those that begin with them."""
    wanted: dict[str, bool] = {}
    snapshots: list[str] = []
    for job in jobs:
        for rollout_id, new in _touched(batch, job):
            wanted[rollout_id] = new or wanted.get(rollout_id, False)
        if isinstance(job.payload, NewOutcome):
            snapshots.append(job.payload.snapshot_id)
    if snapshots:
        for (rollout_id,) in batch.connection.execute(
            _OF_SNAPSHOTS, {"snapshots": orjson.dumps(snapshots).decode()}
        ).fetchall():
            wanted.setdefault(rollout_id, False)
    if wanted:
        lock(batch, wanted)


def lock(batch: Batch, wanted: dict[str, bool]) -> None:
    """Lock rollouts by their ids; those with true are made if they are missing."""
    ids = sorted(wanted)
    parameters = {
        "ids": ids,
        "incarnations": [uuid.uuid4().hex for _ in ids],
        "new": [int(wanted[rollout_id]) for rollout_id in ids],
        "now": batch.now,
    }
    made = [row[0] for row in batch.connection.execute(_LOCK, parameters).fetchall()]
    undone = [rollout_id for rollout_id in made if not wanted[rollout_id]]
    if undone:
        # It was deleted between the look and the lock, and nobody wants it anew.
        batch.connection.execute("DELETE FROM rollouts WHERE rollout_id = ANY(:ids)", {"ids": undone})


def _touched(batch: Batch, job: Job) -> Iterator[tuple[str, bool]]:
    """The rollouts that a job is about, and whether it opens those that do not exist."""
    payload = job.payload
    match payload:
        case Put():
            # A call that began here belongs to a rollout that exists, or was deleted since.
            yield payload.entry.rollout_id, payload.begun is None
        case Call():
            yield payload.rollout_id, job.operation is begin_calls
        case Mark():
            yield payload.rollout_id, True
        case Drop():
            yield payload.rollout_id, False
        case Removal():
            yield from ((rollout_id, False) for rollout_id in payload.rollout_ids)
        case str():
            yield payload, False
        case float() | int():
            rows = batch.connection.execute(_OLD_TOMBSTONES, {"before": batch.now - payload})
            yield from ((row[0], False) for row in rows.fetchall())
