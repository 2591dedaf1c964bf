"""What became of all rollouts of a database, counted. Read-only; each statement is a short read of its own.

Outcomes outlive the rollouts that they are of, so this also counts what was delivered and retired.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from token_id_capture.lifecycle import Outcome, State
from token_id_capture.store.driver import Connection
from token_id_capture.store.outcome_order import FORBIDS_TRAINING, latest_of

# An administrator's release says nothing about a build, so what was decided before it counts.
_IS_LATEST: Final = f"""o.outcome_id = {latest_of("o.snapshot_id", f"l.outcome <> '{Outcome.RELEASED}'")}"""
_LATEST: Final = f"FROM build_outcomes AS o WHERE {_IS_LATEST}"
_SPAN = f"SELECT min(recorded_at), max(recorded_at) FROM build_outcomes WHERE outcome <> '{Outcome.RELEASED}'"
# A cast truncates in SQLite and rounds in PostgreSQL; whole numbers are divided alike.
_SLOT: Final = "CAST((o.recorded_at - :start) * 1000000 AS BIGINT) / CAST(:width * 1000000 AS BIGINT)"
_COUNTS = f"""
    SELECT {_SLOT} AS slot, o.outcome, o.reason, count(*),
           coalesce(sum(CAST(json_extract(o.metrics, '$.generated_tokens_captured') AS INTEGER)), 0),
           coalesce(sum(CAST(json_extract(o.metrics, '$.generated_tokens_delivered') AS INTEGER)), 0)
    {_LATEST} GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
"""
_CAUSES = f"""
    SELECT o.reason, j.key, sum(CAST(j.value AS INTEGER))
    FROM build_outcomes AS o CROSS JOIN json_each(o.metrics, '$.causes') AS j
    WHERE {_IS_LATEST} AND o.{FORBIDS_TRAINING} GROUP BY 1, 2 ORDER BY 3 DESC, 2
"""
_CAUSES_IN_TIME = f"""
    SELECT {_SLOT}, j.key, sum(CAST(j.value AS INTEGER))
    FROM build_outcomes AS o CROSS JOIN json_each(o.metrics, '$.causes') AS j WHERE {_IS_LATEST} GROUP BY 1, 2
"""
_BUILDS = f"""
    SELECT o.rollout_id, o.outcome, CAST(json_extract(o.metrics, '$.n_calls') AS INTEGER),
           CAST(json_extract(o.metrics, '$.generated_tokens_captured') AS INTEGER)
    {_LATEST} ORDER BY o.outcome_id DESC LIMIT :limit
"""
# Of whole rollouts, since a part of one would look fresher than it is.
_WEIGHTS = """
    WITH latest AS (SELECT rollout_id, rowid AS place FROM rollouts ORDER BY rowid DESC LIMIT :rollouts)
    SELECT latest.place, count(DISTINCT json_extract(e.extras, '$.weight_version'))
    FROM latest JOIN entries AS e ON e.rollout_id = latest.rollout_id
    WHERE json_extract(e.extras, '$.weight_version') IS NOT NULL GROUP BY 1
"""
_STATES = "SELECT state, count(*) FROM rollouts GROUP BY state"
_FLAGS = """
    SELECT reason, count(*), count(DISTINCT rollout_id) FROM incomplete_flags GROUP BY reason ORDER BY 2 DESC, 1
"""
_OPEN_CALLS = "SELECT count(*) FROM call_intents WHERE outcome IS NULL"
_KEPT = f"""
    SELECT o.rollout_id, o.version, o.outcome, o.reason, o.recorded_at
    FROM build_outcomes AS o JOIN rollouts AS r ON r.rollout_id = o.rollout_id AND r.snapshot_id = o.snapshot_id
    WHERE o.{FORBIDS_TRAINING} AND r.state = '{State.FROZEN}' AND o.outcome_id = {latest_of("o.snapshot_id")}
    ORDER BY o.outcome_id DESC LIMIT :limit
"""


@dataclass(frozen=True, slots=True)
class OutcomeCount:
    """Rollouts with one outcome and reason in one slot of time, by their latest outcome.

    ``captured`` and ``delivered`` are sampled tokens, as far as the outcomes' metrics tell.
    """

    slot: int
    outcome: str
    reason: str
    rollouts: int
    captured: int
    delivered: int


@dataclass(frozen=True, slots=True)
class FlagCount:
    """How often a reason made rollouts incomplete that are still in the file."""

    reason: str
    flags: int
    rollouts: int


@dataclass(frozen=True, slots=True)
class CauseCount:
    """Beginnings of sequences of masked rollouts, for one cause."""

    reason: str
    cause: str
    beginnings: int


@dataclass(frozen=True, slots=True)
class BuiltRollout:
    """What the latest outcome of a rollout counted; None where it counted nothing."""

    rollout_id: str
    outcome: str
    calls: int | None
    generated_tokens: int | None


@dataclass(frozen=True, slots=True)
class KeptEvidence:
    """A masked or failed rollout whose captures are in the file."""

    rollout_id: str
    version: int
    outcome: str
    reason: str
    recorded_at: float


def outcome_span(connection: Connection) -> tuple[float, float] | None:
    """When the first and the last outcome was recorded; None if none was."""
    first, last = connection.execute(_SPAN).fetchone()
    return None if first is None else (first, last)


def outcome_counts(connection: Connection, start: float, width: float) -> list[OutcomeCount]:
    """Rollouts by outcome and reason, in slots of ``width`` seconds from ``start`` on."""
    return [OutcomeCount(*row) for row in connection.execute(_COUNTS, {"start": start, "width": width}).fetchall()]


def cause_counts(connection: Connection) -> list[CauseCount]:
    """How often sequences of masked rollouts began anew, by reason and cause, the most frequent first."""
    return [CauseCount(*row) for row in connection.execute(_CAUSES).fetchall()]


def causes_in_time(connection: Connection, start: float, width: float) -> list[tuple[int, str, int]]:
    """Slot, cause and number: how often sequences began anew, whatever the outcome."""
    return connection.execute(_CAUSES_IN_TIME, {"start": start, "width": width}).fetchall()


def built_rollouts(connection: Connection, limit: int) -> list[BuiltRollout]:
    """The rollouts with the latest outcomes, the last first."""
    return [BuiltRollout(*row) for row in connection.execute(_BUILDS, {"limit": limit}).fetchall()]


def weight_versions(connection: Connection, rollouts: int) -> list[int]:
    """How many versions of the weights answered each of the latest rollouts whose captures are in the file."""
    return [count for _, count in connection.execute(_WEIGHTS, {"rollouts": rollouts}).fetchall()]


def state_counts(connection: Connection) -> dict[str, int]:
    """Rollouts by state."""
    return dict(connection.execute(_STATES).fetchall())


def flag_counts(connection: Connection) -> list[FlagCount]:
    """Flags by reason, the most frequent first."""
    return [FlagCount(*row) for row in connection.execute(_FLAGS).fetchall()]


def open_calls(connection: Connection) -> int:
    """Calls that were begun and have not ended."""
    return int(connection.execute(_OPEN_CALLS).fetchone()[0])


def kept_evidence(connection: Connection, limit: int) -> list[KeptEvidence]:
    """The latest masked and failed rollouts that can still be looked into."""
    return [KeptEvidence(*row) for row in connection.execute(_KEPT, {"limit": limit}).fetchall()]
