"""Forget what is old: tombstones, the audit trail of what is gone, and, if asked, kept evidence.

Rollouts that are open, or frozen without an outcome, are never touched, however old they are.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from token_id_capture import reasons
from token_id_capture.lifecycle import Outcome, State
from token_id_capture.store.driver import Connection
from token_id_capture.store.maintain.liveness import Clock, Liveness, liveness
from token_id_capture.store.maintain.maintenance import Housekeeping, housekeeping
from token_id_capture.store.maintain.verification import Progress
from token_id_capture.store.outcome_order import FORBIDS_TRAINING, latest_of
from token_id_capture.store.reading import Location, reading
from token_id_capture.store.server_url import ServerUrl
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
_OLD_WRITERS = (
    "SELECT writer_id, pid, host, boot_id, started_at, last_seen_at FROM writers WHERE last_seen_at < :before"
)


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


def find_old(location: Location, older_than_seconds: float) -> Old:
    """Look for what may go; nothing is changed.

    Raises:
        UnusableDatabaseError: the file is missing or cannot be used.
    """
    before = time.time() - older_than_seconds
    parameters = {"before": before}
    with reading(location) as connection:
        evidence = connection.execute(f"SELECT r.rollout_id, o.reason {_EVIDENCE}", parameters).fetchall()
        return Old(
            before=before,
            tombstones=_count(connection, _TOMBSTONES, parameters),
            outcomes=_count(connection, _OUTCOMES, parameters),
            late_writes=_count(connection, _LATE_WRITES, parameters),
            writers=_forgettable_writers(connection, parameters, location),
            evidence=tuple(rollout_id for rollout_id, _ in evidence),
            evidence_reasons=Counter(reason for _, reason in evidence),
        )


def prune(
    location: Location, old: Old, *, with_evidence: bool, note: str, progress: Progress = lambda what, done, total: None
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
    with housekeeping(location) as work:
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


def _count(connection: Connection, rows: str, parameters: dict[str, Any]) -> int:
    return int(connection.execute(f"SELECT count(*) {rows}", parameters).fetchone()[0])


def _retire_evidence(work: Housekeeping, old: Old, reason: str, pruned: Pruned, progress: Progress) -> None:
    for start in range(0, len(old.evidence), _ROLLOUTS_PER_STEP):
        progress("evidence", start, len(old.evidence))
        listed = json.dumps(old.evidence[start : start + _ROLLOUTS_PER_STEP])
        with work.transaction() as batch:
            work.lock(batch, old.evidence[start : start + _ROLLOUTS_PER_STEP])
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


def _sweep_tombstones(work: Housekeeping, parameters: dict[str, Any]) -> int:
    with work.transaction() as batch:
        oldest = f"SELECT rollout_id {_TOMBSTONES} ORDER BY retired_at LIMIT {_ROLLOUTS_PER_STEP}"
        found = [row[0] for row in batch.connection.execute(oldest, parameters).fetchall()]
        work.lock(batch, found)
        # Looked at again behind the lock: an id may have been deleted and used anew meanwhile.
        again = f"SELECT rollout_id {_TOMBSTONES} AND rollout_id IN (SELECT value FROM json_each(:listed))"
        still = batch.connection.execute(again, {**parameters, "listed": json.dumps(found)}).fetchall()
        remove(batch, Removal(tuple(row[0] for row in still), keep_tombstone=False))
    return len(still)


def _forget_outcomes(work: Housekeeping, parameters: dict[str, Any]) -> int:
    forgotten = 0
    last = work.connection.execute("SELECT max(outcome_id) FROM build_outcomes").fetchone()[0] or 0
    for first in range(0, last, _ROWS_PER_STEP):
        with work.transaction() as batch:
            forgotten += batch.connection.execute(
                f"DELETE FROM build_outcomes WHERE outcome_id IN (SELECT o.outcome_id {_OUTCOMES} "
                "AND o.outcome_id > :first AND o.outcome_id <= :last)",
                {**parameters, "first": first, "last": first + _ROWS_PER_STEP},
            ).rowcount
    return forgotten


def _forgettable_writers(connection: Connection, parameters: dict[str, Any], location: Location) -> tuple[str, ...]:
    """Processes that are gone, and that neither a call nor an intent names."""
    on_server = isinstance(location, ServerUrl)
    clock = Clock.of_server(connection) if on_server else None
    gone = {row[0] for row in connection.execute(_OLD_WRITERS, parameters) if _cannot_write(*row[1:], clock=clock)}
    gone -= {row[0] for row in connection.execute("SELECT DISTINCT writer_id FROM call_intents")} if gone else set()
    for table in ("entries", "snapshot_entries", "late_writes"):
        if gone:
            gone.difference_update(_named_in(connection, table, at_once=on_server))
    return tuple(sorted(gone))


def _named_in(connection: Connection, table: str, *, at_once: bool) -> Iterator[str]:
    """The processes that rows of a table name. No index has them, so the rows are read."""
    if at_once:
        yield from (row[0] for row in connection.execute(f"SELECT DISTINCT writer_id FROM {table}"))
        return
    # Some rows at a time, so as not to pin the WAL.
    last = connection.execute(f"SELECT max(rowid) FROM {table}").fetchone()[0] or 0
    for first in range(0, last, _ROWS_PER_STEP):
        some = f"SELECT DISTINCT writer_id FROM {table} WHERE rowid > ? AND rowid <= ?"
        yield from (row[0] for row in connection.execute(some, (first, first + _ROWS_PER_STEP)))


def _cannot_write(
    pid: int, host: str, booted: str, started_at: float, last_seen_at: float, *, clock: Clock | None
) -> bool:
    # WAL mode binds a file to one kernel, so a process of another boot has no part in it any more,
    # wherever that was. Processes of a server come from many.
    other_kernel = clock is None and booted.partition("/")[0] != boot_id().partition("/")[0]
    return other_kernel or liveness(pid, host, booted, started_at, last_seen_at, clock) is Liveness.DEAD


def _forget_writers(batch: Batch, old: Old) -> int:
    # A process that is gone begins no call and stores no entry, so what find_old saw still holds.
    return batch.connection.execute(
        "DELETE FROM writers WHERE writer_id IN (SELECT value FROM json_each(:listed)) AND last_seen_at < :before",
        {"listed": json.dumps(old.writers), "before": old.before},
    ).rowcount
