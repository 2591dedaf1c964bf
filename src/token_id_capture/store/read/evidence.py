"""Read one rollout as a whole, without freezing or changing anything.

Use it on a connection of ``reading.read_only``. Each function reads in one short transaction, so
the result is one state of the rollout, even while others write.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from token_id_capture import reasons
from token_id_capture.lifecycle import BuildOutcome, Flag, Intent, LateWrite, State
from token_id_capture.protocols import TokenCaptureSnapshot
from token_id_capture.store.codec import unpack_rollout
from token_id_capture.store.driver import Connection
from token_id_capture.store.file.read_only import transaction
from token_id_capture.store.outcome_order import OLDEST_FIRST
from token_id_capture.store.read import queries

_ROLLOUTS_PER_PAGE: Final = 200

_PAGE = """
    SELECT rollout_id FROM rollouts AS r WHERE rollout_id > :after AND {wanted} ORDER BY rollout_id LIMIT :limit
"""
# An expression keeps SQLite from the index by state, after which every page would have to be sorted.
_NOT_BY_INDEX = "CAST(r.state AS TEXT)"
_ROLLOUT = """
    SELECT state, version, snapshot_id, opened_at, frozen_at, retired_at,
           EXISTS (SELECT 1 FROM incomplete_flags AS f WHERE f.rollout_id = r.rollout_id)
        OR EXISTS (SELECT 1 FROM call_intents AS i WHERE i.rollout_id = r.rollout_id AND i.outcome IS NULL)
    FROM rollouts AS r WHERE rollout_id = :rollout
"""
_SNAPSHOT = "SELECT version, incomplete FROM snapshots WHERE snapshot_id = :snapshot ORDER BY version DESC LIMIT 1"
# Outcomes outlive a rollout; those of an earlier use of its id say nothing about this one.
_OUTCOMES = f"""
    SELECT version, outcome, reason, metrics, recorded_at FROM build_outcomes
    WHERE snapshot_id = :snapshot ORDER BY {OLDEST_FIRST}
"""
# By name: a rollout that has a snapshot was not written since, so its entries are the same calls.
_TIMES = "SELECT model_call_id, begun_at, stored_at FROM entries WHERE rollout_id = :rollout"


@dataclass(frozen=True, slots=True)
class CallTimes:
    """When a call was begun, None if nobody recorded it, and when its record was committed."""

    begun_at: float | None
    stored_at: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """One state of one rollout. Times in seconds since the epoch, None if it has not come to that.

    ``snapshot`` is what a freeze would have given at this moment: the latest snapshot of a frozen
    rollout, incomplete if a mark landed after it; of an open one all that is stored so far, with an
    empty ``snapshot_id``; of a retired one it is empty, as its evidence is gone.
    """

    rollout_id: str
    state: State
    opened_at: float
    frozen_at: float | None
    retired_at: float | None
    snapshot: TokenCaptureSnapshot
    outcomes: tuple[BuildOutcome, ...]
    flags: tuple[Flag, ...] = ()
    intents: tuple[Intent, ...] = ()
    late_writes: tuple[LateWrite, ...] = ()
    times: Mapping[str, CallTimes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scope:
    """Which rollouts are meant: all, or those of these ids, and those opened since (seconds since the epoch)."""

    rollout_ids: tuple[str, ...] = ()
    opened_since: float | None = None

    def parameters(self) -> dict[str, Any]:
        """What the conditions of ``conditions`` name."""
        return {"since": self.opened_since, "listed": json.dumps(self.rollout_ids)}

    def conditions(self, states: tuple[str, ...], state: str = "r.state") -> str:
        """What is true of a rollout that is meant and in one of these states."""
        listed = ", ".join(f"'{State(state)}'" for state in states)
        found = [f"{state} IN ({listed})"]
        if self.rollout_ids:
            found.append("r.rollout_id IN (SELECT value FROM json_each(:listed))")
        if self.opened_since is not None:
            found.append("r.opened_at >= :since")
        return " AND ".join(found)


ALL_ROLLOUTS: Final = Scope()


def rollout_ids(connection: Connection, states: tuple[str, ...], scope: Scope = ALL_ROLLOUTS) -> Iterator[str]:
    """The ids of the rollouts in these states, in their order, a page at a time."""
    after, statement = "", _PAGE.format(wanted=scope.conditions(states, _NOT_BY_INDEX))
    parameters = {**scope.parameters(), "limit": _ROLLOUTS_PER_PAGE}
    while page := connection.execute(statement, {**parameters, "after": after}).fetchall():
        yield from (row[0] for row in page)
        after = page[-1][0]


def count_rollouts(connection: Connection, states: tuple[str, ...], scope: Scope = ALL_ROLLOUTS) -> int:
    """How many rollouts are in these states."""
    statement = f"SELECT count(*) FROM rollouts AS r WHERE {scope.conditions(states)}"
    return int(connection.execute(statement, scope.parameters()).fetchone()[0])


def state_of(connection: Connection, rollout_id: str) -> State | None:
    """The state of a rollout; None if it is not in the database."""
    row = connection.execute("SELECT state FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
    return None if row is None else State(row[0])


def read_evidence(connection: Connection, rollout_id: str, *, everything: bool = True) -> Evidence:
    """Read one rollout; without ``everything`` only its snapshot and outcomes.

    Raises:
        UnknownRolloutError: it is not in the database.
        CorruptCaptureError: stored tokens do not match their digest; the message names the call.
    """
    with transaction(connection):
        row = connection.execute(_ROLLOUT, {"rollout": rollout_id}).fetchone()
        if row is None:
            raise queries.unknown(rollout_id)
        state, version, snapshot_id, opened_at, frozen_at, retired_at, incomplete = row
        head, rows = _entry_rows(connection, rollout_id, state, snapshot_id)
        stale = head is not None and version > head[0]
        incomplete = bool(incomplete if head is None else head[1] or stale)
        known = None if head is None or stale else (snapshot_id, head[0])
        missing = _missing(connection, rollout_id, known) if incomplete else ()
        outcomes = queries.outcomes(connection.execute(_OUTCOMES, {"snapshot": snapshot_id}))
        more: dict[str, Any] = (
            {
                "flags": queries.flags(connection.execute, rollout_id),
                "intents": queries.intents(connection.execute, rollout_id),
                "late_writes": queries.late_writes(connection.execute, rollout_id),
                "times": _times(connection, rollout_id),
            }
            if everything
            else {}
        )
    # The transaction is over: joining and checking the tokens must not pin the WAL.
    snapshot = TokenCaptureSnapshot(
        rollout_id,
        unpack_rollout(rollout_id, rows),
        incomplete=incomplete,
        snapshot_id=snapshot_id if head is not None else "",
        version=version,
        flags=missing,
    )
    return Evidence(
        rollout_id,
        State(state),
        opened_at,
        frozen_at,
        retired_at,
        snapshot,
        outcomes,
        **more,
    )


def _times(connection: Connection, rollout_id: str) -> dict[str, CallTimes]:
    rows = connection.execute(_TIMES, {"rollout": rollout_id}).fetchall()
    return {call: CallTimes(begun_at, stored_at) for call, begun_at, stored_at in rows}


def _missing(connection: Connection, rollout_id: str, snapshot: tuple[str, int] | None) -> tuple[Flag, ...]:
    """The flags that a freeze would give now: those of the snapshot that stands, else flags and open calls."""
    if snapshot is not None:
        return queries.snapshot_flags(connection.execute, *snapshot)
    lost = (
        Flag(intent.model_call_id, reasons.CALL_LOST, "", origin=intent.origin)
        for intent in queries.intents(connection.execute, rollout_id)
        if intent.outcome is None
    )
    return (*queries.flags(connection.execute, rollout_id), *lost)


def _entry_rows(
    connection: Connection, rollout_id: str, state: str, snapshot_id: str | None
) -> tuple[tuple[int, int] | None, queries.Rows]:
    """Version and completeness of the latest snapshot, None if there is none, and the rows of the calls."""
    if state != State.FROZEN:
        return None, queries.entry_rows(connection.execute, rollout_id)
    head = connection.execute(_SNAPSHOT, {"snapshot": snapshot_id}).fetchone()
    return head, queries.snapshot_rows(connection.execute, str(snapshot_id), head[0]) or []
