"""What people and commands read: summaries, one rollout in full, and its stored entries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, bindparam, func, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from token_id_capture.errors import UnknownRolloutError
from token_id_capture.store.schema import (
    ENTRY_COLUMNS,
    build_outcomes,
    call_intents,
    entries,
    incomplete_flags,
    late_writes,
    rollouts,
    snapshot_entries,
    snapshots,
    writers,
)


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """One rollout in a line; lengths in tokens, times in seconds since the epoch.

    ``outcome`` and ``reason`` are those of the latest verdict, None if there is none.
    """

    rollout_id: str
    state: str
    version: int
    snapshot_id: str | None
    calls: int
    prompt_tokens_longest: int
    generated_tokens: int
    flags: int
    open_intents: int
    outcome: str | None
    reason: str | None
    opened_at: float


@dataclass(frozen=True, slots=True)
class CallSummary:
    """One stored call, without its tokens."""

    model_call_id: str
    prefix_call_id: str | None
    prefix_length: int
    prompt_length: int
    generation_length: int
    model: str
    finish_reason: str | None
    created_at: float


@dataclass(frozen=True, slots=True)
class FlagSummary:
    """Why the rollout is incomplete."""

    model_call_id: str
    reason: str
    detail: str
    flagged_at: float


@dataclass(frozen=True, slots=True)
class IntentSummary:
    """A call that was begun and of which no entry is stored; ``outcome`` None means still open."""

    model_call_id: str
    outcome: str | None
    detail: str
    begun_at: float
    writer_pid: int
    writer_host: str


@dataclass(frozen=True, slots=True)
class OutcomeSummary:
    """A consumer's verdict."""

    version: int
    outcome: str
    reason: str
    recorded_at: float


@dataclass(frozen=True, slots=True)
class LateWriteSummary:
    """A record that was refused because it came too late."""

    model_call_id: str
    state: str
    attempted_at: float


@dataclass(frozen=True, slots=True)
class RolloutDetail:
    """All that is stored about one rollout, but for tokens."""

    summary: RolloutSummary
    calls: tuple[CallSummary, ...]
    flags: tuple[FlagSummary, ...]
    intents: tuple[IntentSummary, ...]
    outcomes: tuple[OutcomeSummary, ...]
    late_writes: tuple[LateWriteSummary, ...]


def _of(table: Any, what: Any) -> Any:
    return select(what).where(table.c.rollout_id == rollouts.c.rollout_id).correlate(rollouts).scalar_subquery()


def latest_outcome(value: Any) -> Any:
    """A column of the latest verdict on a rollout, for a statement that selects from ``rollouts``."""
    return (
        select(value)
        # Outcomes outlive a rollout; those of an earlier use of the id say nothing about this one.
        .where(
            build_outcomes.c.rollout_id == rollouts.c.rollout_id, build_outcomes.c.recorded_at >= rollouts.c.opened_at
        )
        .order_by(build_outcomes.c.outcome_id.desc())
        .limit(1)
        .correlate(rollouts)
        .scalar_subquery()
    )


def summaries() -> Select[Any]:
    """A statement whose rows are the fields of ``RolloutSummary``. Of entries it reads only an index."""
    open_intents = (
        select(func.count())
        .select_from(call_intents)
        .where(call_intents.c.rollout_id == rollouts.c.rollout_id, call_intents.c.outcome.is_(None))
        .correlate(rollouts)
        .scalar_subquery()
    )
    longest_prompt = entries.c.sequence_length - entries.c.generation_length
    return select(
        rollouts.c.rollout_id,
        rollouts.c.state,
        rollouts.c.version,
        rollouts.c.snapshot_id,
        _of(entries, func.count()).label("calls"),
        _of(entries, func.coalesce(func.max(longest_prompt), 0)).label("prompt_tokens_longest"),
        _of(entries, func.coalesce(func.sum(entries.c.generation_length), 0)).label("generated_tokens"),
        _of(incomplete_flags, func.count()).label("flags"),
        open_intents.label("open_intents"),
        latest_outcome(build_outcomes.c.outcome).label("outcome"),
        latest_outcome(build_outcomes.c.reason).label("reason"),
        rollouts.c.opened_at,
    )


_ONE = summaries().where(rollouts.c.rollout_id == bindparam("rollout"))
_CALLS = (
    select(*(entries.c[name] for name in CallSummary.__dataclass_fields__))
    .where(entries.c.rollout_id == bindparam("rollout"))
    .order_by(text("entries.rowid"))
)
_FLAGS = (
    select(*(incomplete_flags.c[name] for name in FlagSummary.__dataclass_fields__))
    .where(incomplete_flags.c.rollout_id == bindparam("rollout"))
    .order_by(incomplete_flags.c.flag_id)
)
_INTENTS = (
    select(
        call_intents.c.model_call_id,
        call_intents.c.outcome,
        call_intents.c.detail,
        call_intents.c.begun_at,
        writers.c.pid,
        writers.c.host,
    )
    .join(writers, writers.c.writer_id == call_intents.c.writer_id)
    .where(call_intents.c.rollout_id == bindparam("rollout"))
    .order_by(call_intents.c.begun_at, call_intents.c.model_call_id)
)
_OUTCOMES = (
    select(*(build_outcomes.c[name] for name in OutcomeSummary.__dataclass_fields__))
    .where(build_outcomes.c.rollout_id == bindparam("rollout"))
    .order_by(build_outcomes.c.outcome_id)
)
_LATE_WRITES = (
    select(*(late_writes.c[name] for name in LateWriteSummary.__dataclass_fields__))
    .where(late_writes.c.rollout_id == bindparam("rollout"))
    .order_by(late_writes.c.attempted_at)
)
_ENTRY_ROWS = (
    select(*(entries.c[name] for name in ENTRY_COLUMNS))
    .where(entries.c.rollout_id == bindparam("rollout"))
    .order_by(text("entries.rowid"))
)
_SNAPSHOT_ROWS = (
    select(*(snapshot_entries.c[name] for name in ENTRY_COLUMNS))
    .where(
        snapshot_entries.c.snapshot_id == bindparam("snapshot"),
        snapshot_entries.c.version == bindparam("at_version"),
    )
    .order_by(text("snapshot_entries.rowid"))
)

_SNAPSHOT = select(snapshots.c.entry_count).where(
    snapshots.c.snapshot_id == bindparam("snapshot"), snapshots.c.version == bindparam("at_version")
)

Rows = list[Mapping[str, Any]]


async def describe_rollout(connection: AsyncConnection, rollout_id: str) -> RolloutDetail:
    """One rollout in full.

    Raises:
        UnknownRolloutError: there is no row of it.
    """
    parameters = {"rollout": rollout_id}
    summary = (await connection.execute(_ONE, parameters)).one_or_none()
    if summary is None:
        raise UnknownRolloutError(
            f"no rollout {rollout_id!r} is in this database: check the id (tokcap ls lists them) and --database"
        )
    return RolloutDetail(
        summary=RolloutSummary(*summary),
        calls=tuple(CallSummary(*row) for row in await connection.execute(_CALLS, parameters)),
        flags=tuple(FlagSummary(*row) for row in await connection.execute(_FLAGS, parameters)),
        intents=tuple(IntentSummary(*row) for row in await connection.execute(_INTENTS, parameters)),
        outcomes=tuple(OutcomeSummary(*row) for row in await connection.execute(_OUTCOMES, parameters)),
        late_writes=tuple(LateWriteSummary(*row) for row in await connection.execute(_LATE_WRITES, parameters)),
    )


async def entry_rows(connection: AsyncConnection, rollout_id: str) -> Rows:
    """The rows of a rollout's entries, in the order in which they were stored."""
    return list((await connection.execute(_ENTRY_ROWS, {"rollout": rollout_id})).mappings())  # type: ignore[arg-type]


async def snapshot_rows(connection: AsyncConnection, snapshot_id: str, version: int) -> Rows:
    """The rows of a snapshot's entries, in the order in which they were stored."""
    result = await connection.execute(_SNAPSHOT_ROWS, {"snapshot": snapshot_id, "at_version": version})
    return list(result.mappings())  # type: ignore[arg-type]


async def snapshot_exists(connection: AsyncConnection, snapshot_id: str, version: int) -> bool:
    """Whether this version of the snapshot is still stored."""
    result = await connection.execute(_SNAPSHOT, {"snapshot": snapshot_id, "at_version": version})
    return result.one_or_none() is not None
