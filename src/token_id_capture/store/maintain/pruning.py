"""Forget what is old: tombstones, the audit trail of what is gone, and, if asked, kept evidence.

Rollouts that are open, or frozen without a outcome, are never touched, however old they are.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from token_id_capture import reasons
from token_id_capture.lifecycle import Outcome, State
from token_id_capture.store.file.read_only import read_only
from token_id_capture.store.maintain.liveness import Liveness, liveness_of
from token_id_capture.store.maintain.maintenance import Maintenance, maintenance
from token_id_capture.store.maintain.verification import Progress
from token_id_capture.store.outcome_order import FORBIDS_TRAINING, latest_of
from token_id_capture.store.write.process import boot_id
from token_id_capture.store.write.queue import Batch
from token_id_capture.store.write.retirement import Removal, remove
from token_id_capture.store.write.snapshot import NewOutcome, append_outcome

# Rows a step: a few milliseconds behind the writer lock.
_ROLLOUTS_PER_STEP: Final = 100
_ROWS_PER_STEP: Final = 5_000

_EVIDENCE = f"""
    FROM rollouts AS r JOIN build_outcomes AS o ON o.outcome_id = {latest_of("r.snapshot_id")}
    WHERE r.state = '{State.FROZEN}' AND o.{FORBIDS_TRAINING} AND o.recorded_at < :before
"""
_TOMBSTONES = f"FROM rollouts WHERE state = '{State.RETIRED}' AND retired_at < :before"
_IS_GONE = f"""
    NOT EXISTS (SELECT 1 FROM rollouts AS r WHERE r.rollout_id = {{row}}.rollout_id
                 AND NOT (r.state = '{State.RETIRED}' AND r.retired_at < :before))
"""
_OUTCOMES = """
    FROM build_outcomes AS o WHERE o.recorded_at < :before
      AND NOT EXISTS (SELECT 1 FROM snapshots AS s WHERE s.snapshot_id = o.snapshot_id) AND
""" + _IS_GONE.format(row="o")
_LATE_WRITES = "FROM late_writes AS w WHERE w.attempted_at < :before AND" + _IS_GONE.format(row="w")
_OLD_WRITERS = "SELECT writer_id, pid, host, boot_id, started_at FROM writers WHERE last_seen_at < :before"


@dataclass(frozen=True, slots=True)
class Old:
    """What is older than ``before`` (seconds since the epoch) and may go.

    ``evidence`` holds rollout ids, and ``evidence_reasons`` why they were masked or had failed;
    ``writers`` holds the ids of processes that are gone and that nothing names any more.
    """

    before: float
    tombstones: int
    outcomes: int
    late_writes: int
    writers: tuple[str, ...]
    evidence: tuple[str, ...]
    evidence_reasons: Counter[str] = field(default_factory=Counter)

    @property
    def anything(self) -> bool:
        """Whether there is something besides evidence."""
        return bool(self.tombstones or self.outcomes or self.late_writes or self.writers)


@dataclass(slots=True)
class Pruned:
    """How many rows, or rollouts, were removed."""

    evidence: int = 0
    tombstones: int = 0
    outcomes: int = 0
    late_writes: int = 0
    writers: int = 0


def find_old(path: Path, older_than_seconds: float) -> Old:
    """Look for what may go; nothing is changed.

    Raises:
        UnusableDatabaseError: the file is missing or cannot be used.
    """
    before = time.time() - older_than_seconds
    parameters = {"before": before}
    with read_only(path) as connection:
        evidence = connection.execute(f"SELECT r.rollout_id, o.reason {_EVIDENCE}", parameters).fetchall()
        return Old(
            before=before,
            tombstones=_count(connection, _TOMBSTONES, parameters),
            outcomes=_count(connection, _OUTCOMES, parameters),
            late_writes=_count(connection, _LATE_WRITES, parameters),
            writers=_forgettable_writers(connection, parameters),
            evidence=tuple(rollout_id for rollout_id, _ in evidence),
            evidence_reasons=Counter(reason for _, reason in evidence),
        )


def prune(
    path: Path, old: Old, *, with_evidence: bool, note: str, progress: Progress = lambda what, done, total: None
) -> Pruned:
    """Remove what ``find_old`` found and is still as old, in short steps between which others write.

    Args:
        with_evidence: retire masked and failed rollouts too. That they were released stays in the
            audit trail, as an outcome ``released`` with the reason ``pruned: `` + ``note``.

    Raises:
        UnusableDatabaseError: the file is missing or cannot be used.
    """
    pruned = Pruned()
    parameters = {"before": old.before}
    with maintenance(path) as work:
        if with_evidence:
            _retire_evidence(work, old, f"{reasons.PRUNED}: {note}", pruned, progress)
        while swept := _sweep_tombstones(work, parameters):
            pruned.tombstones += swept
            progress("tombstones", pruned.tombstones, max(old.tombstones, pruned.tombstones))
        pruned.outcomes = _forget_outcomes(work, parameters)
        with work.transaction() as batch:
            pruned.late_writes = batch.connection.execute(
                f"DELETE FROM late_writes WHERE rowid IN (SELECT w.rowid {_LATE_WRITES})", parameters
            ).rowcount
            pruned.writers = _forget_writers(batch, old)
    return pruned


def _count(connection: sqlite3.Connection, rows: str, parameters: dict[str, Any]) -> int:
    return int(connection.execute(f"SELECT count(*) {rows}", parameters).fetchone()[0])


def _retire_evidence(work: Maintenance, old: Old, reason: str, pruned: Pruned, progress: Progress) -> None:
    for start in range(0, len(old.evidence), _ROLLOUTS_PER_STEP):
        progress("evidence", start, len(old.evidence))
        listed = json.dumps(old.evidence[start : start + _ROLLOUTS_PER_STEP])
        with work.transaction() as batch:
            # Looked up again, since a rollout may have been finalized or retired meanwhile.
            still = batch.connection.execute(
                f"SELECT r.rollout_id, r.snapshot_id, r.version {_EVIDENCE} "
                "AND r.rollout_id IN (SELECT value FROM json_each(:listed))",
                {"before": old.before, "listed": listed},
            ).fetchall()
            for rollout_id, snapshot_id, version in still:
                append_outcome(batch, rollout_id, NewOutcome(snapshot_id, version, Outcome.RELEASED, reason, "{}"))
            remove(batch, Removal(tuple(row[0] for row in still), keep_tombstone=True))
        pruned.evidence += len(still)


def _sweep_tombstones(work: Maintenance, parameters: dict[str, Any]) -> int:
    with work.transaction() as batch:
        rows = batch.connection.execute(
            f"SELECT rollout_id {_TOMBSTONES} ORDER BY retired_at LIMIT {_ROLLOUTS_PER_STEP}", parameters
        ).fetchall()
        remove(batch, Removal(tuple(row[0] for row in rows), keep_tombstone=False))
    return len(rows)


def _forget_outcomes(work: Maintenance, parameters: dict[str, Any]) -> int:
    forgotten = 0
    last = _last_row(work.connection, "build_outcomes")
    for first in range(0, last, _ROWS_PER_STEP):
        with work.transaction() as batch:
            forgotten += batch.connection.execute(
                f"DELETE FROM build_outcomes WHERE outcome_id IN (SELECT o.outcome_id {_OUTCOMES} "
                "AND o.outcome_id > :first AND o.outcome_id <= :last)",
                {**parameters, "first": first, "last": first + _ROWS_PER_STEP},
            ).rowcount
    return forgotten


def _forgettable_writers(connection: sqlite3.Connection, parameters: dict[str, Any]) -> tuple[str, ...]:
    """Processes that are gone, and that neither a call nor an intent names."""
    gone = {row[0] for row in connection.execute(_OLD_WRITERS, parameters) if _cannot_write(*row[1:])}
    gone -= {row[0] for row in connection.execute("SELECT DISTINCT writer_id FROM call_intents")} if gone else set()
    for table in ("entries", "snapshot_entries", "late_writes"):
        # No index names the writer, so the rows are read, some at a time so as not to pin the WAL.
        for first in range(0, _last_row(connection, table) if gone else 0, _ROWS_PER_STEP):
            rows = connection.execute(
                f"SELECT DISTINCT writer_id FROM {table} WHERE rowid > ? AND rowid <= ?",
                (first, first + _ROWS_PER_STEP),
            )
            gone.difference_update(row[0] for row in rows)
    return tuple(sorted(gone))


def _cannot_write(pid: int, host: str, booted: str, started_at: float) -> bool:
    # WAL mode binds a file to one kernel, so a process of another boot has no part in it any more,
    # wherever that was.
    other_kernel = booted.partition("/")[0] != boot_id().partition("/")[0]
    return other_kernel or liveness_of(pid, host, booted, started_at) is Liveness.DEAD


def _forget_writers(batch: Batch, old: Old) -> int:
    # A process that is gone begins no call and stores no entry, so what find_old saw still holds.
    return batch.connection.execute(
        "DELETE FROM writers WHERE writer_id IN (SELECT value FROM json_each(:listed)) AND last_seen_at < :before",
        {"listed": json.dumps(old.writers), "before": old.before},
    ).rowcount


def _last_row(connection: sqlite3.Connection, table: str) -> int:
    return connection.execute(f"SELECT max(rowid) FROM {table}").fetchone()[0] or 0
