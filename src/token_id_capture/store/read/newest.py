"""Rollouts from the newest on, and which of them have changed. For pages that follow a database.

Plain SQL, as in ``queries``. The numbers of rows tell what is new, so a look costs what has changed since
the last one, however much is stored. SQLite gives a number again only where the last row was deleted.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from token_id_capture.lifecycle import Outcome, State
from token_id_capture.store.driver import Execute
from token_id_capture.store.read.queries import SUMMARIES, rollout_summary
from token_id_capture.store.read.summaries import RolloutSummary

# What each table numbers; a table of rows that are only ever changed in place is looked at with another one.
_NUMBERED: Final = {
    "rollouts": "rowid",
    "entries": "rowid",
    "call_intents": "rowid",
    "incomplete_flags": "flag_id",
    "snapshots": "rowid",
    "build_outcomes": "outcome_id",
    "late_writes": "rowid",
}
_MARKS: Final = ", ".join(f"(SELECT coalesce(max({number}), 0) FROM {table})" for table, number in _NUMBERED.items())
_CHANGED: Final = " UNION ".join(
    f"SELECT rollout_id FROM {table} WHERE {number} > :{table}" for table, number in _NUMBERED.items()
)
# Left to itself, SQLite goes through all that were ever retired, by the index of states.
_RETIRED: Final = f"""
    SELECT rollout_id FROM rollouts INDEXED BY rollouts_by_retirement
    WHERE state = '{State.RETIRED}' AND retired_at >= :since
"""
_LINES: Final = SUMMARIES.replace("SELECT", "SELECT r.rowid,", 1)
_OF_IDS: Final = f"{_LINES} WHERE r.rollout_id IN (SELECT value FROM json_each(:rollouts))"

Marks: TypeAlias = Mapping[str, int]
"""The last row of each table at some moment."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which rollouts are listed: those that fulfil all that is not None. ``text`` is a part of the id."""

    text: str | None = None
    state: State | None = None
    outcome: Outcome | None = None
    reason: str | None = None
    cause: str | None = None

    def conditions(self) -> Iterator[str]:
        """What SQL asks of a row of ``SUMMARIES``."""
        if self.text is not None:
            yield "instr(lower(r.rollout_id), lower(:text)) > 0"
        if self.state is not None:
            # An expression keeps SQLite from the index by state, after which all would have to be sorted.
            yield "CAST(r.state AS TEXT) = :state"
        if self.outcome is not None:
            yield "o.latest_outcome = :outcome"
        if self.reason is not None:
            yield "o.latest_reason = :reason"
        if self.cause is not None:
            yield "instr(', ' || o.latest_causes, ', ' || :cause || ' ') > 0"


ANY: Final = Wanted()
ALL: Final = 2**62
"""No row has a number as large, and SQLite takes none that is much larger."""


def newest_rollouts(
    execute: Execute, limit: int, before: int | None = None, wanted: Wanted = ANY
) -> list[tuple[int, RolloutSummary]]:
    """The latest wanted rollouts with the numbers of their rows, the last opened first; those below ``before``."""
    conditions = " AND ".join(["r.rowid < :before", *wanted.conditions()])
    found = execute(
        f"{_LINES} WHERE {conditions} ORDER BY r.rowid DESC LIMIT :limit",
        {
            "limit": limit,
            "before": ALL if before is None else max(0, min(before, ALL)),
            "text": wanted.text,
            "state": wanted.state,
            "outcome": wanted.outcome,
            "reason": wanted.reason,
            "cause": wanted.cause,
        },
    )
    return [(row[0], rollout_summary(row[1:])) for row in found.fetchall()]


def rollouts_of(execute: Execute, rollout_ids: Collection[str]) -> list[tuple[int, RolloutSummary]]:
    """Those of the rollouts that there are, each with the number of its row."""
    found = execute(_OF_IDS, {"rollouts": json.dumps(sorted(rollout_ids))})
    return [(row[0], rollout_summary(row[1:])) for row in found.fetchall()]


def marks(execute: Execute) -> Marks:
    """Where each table ends now."""
    return dict(zip(_NUMBERED, execute(f"SELECT {_MARKS}", {}).fetchone(), strict=True))


def changed_since(execute: Execute, before: Marks, retired_since: float) -> frozenset[str]:
    """The rollouts that got a row since ``before``, or were retired since (seconds since the epoch).

    A call that the engine refused changes a row in place, and is seen with the next one of its rollout.
    """
    parameters: dict[str, Any] = {**before, "since": retired_since}
    return frozenset(row[0] for row in execute(f"{_CHANGED} UNION {_RETIRED}", parameters).fetchall())
