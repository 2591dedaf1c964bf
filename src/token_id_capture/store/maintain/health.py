"""What is left behind: facts about the database, its processes, its open calls and its rollouts.

Reads only, and nothing that an index or a short row does not hold: no blob is touched, so the
counts take about a second for 100,000 rollouts. ``integrity_check``, which reads the whole file, is
a choice of its own.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from token_id_capture.lifecycle import Outcome, State
from token_id_capture.store.driver import Connection
from token_id_capture.store.file.connections import has_wal_reset_bug
from token_id_capture.store.file.location import file_system_of
from token_id_capture.store.file.read_only import transaction, wal_bytes
from token_id_capture.store.file.revision import HEAD_REVISION
from token_id_capture.store.maintain.backup import PARTIAL
from token_id_capture.store.maintain.leftovers import abandoned
from token_id_capture.store.maintain.liveness import Clock, Liveness, liveness
from token_id_capture.store.maintain.verification import structure_damage
from token_id_capture.store.outcome_order import latest_of
from token_id_capture.store.reading import Location, reading
from token_id_capture.store.server_url import ServerUrl

_EXAMPLES: Final = 5
_LATELY_SECONDS: Final = 3600.0

_STATES = "SELECT state, count(*) FROM rollouts GROUP BY state"
_WRITERS = "SELECT writer_id, pid, host, boot_id, started_at, last_seen_at FROM writers ORDER BY last_seen_at DESC"
_OPEN_ROLLOUTS = f"""
    SELECT r.rollout_id, EXISTS (SELECT 1 FROM entries AS e WHERE e.rollout_id = r.rollout_id)
    FROM rollouts AS r WHERE r.state = '{State.OPEN}' ORDER BY r.rollout_id
"""
_FROZEN_ROLLOUTS = f"""
    SELECT r.rollout_id, r.version, o.version, o.outcome, o.reason
    FROM rollouts AS r
    LEFT JOIN build_outcomes AS o ON o.outcome_id = {latest_of("r.snapshot_id")}
    WHERE r.state = '{State.FROZEN}' ORDER BY r.rollout_id
"""
_OPEN_CALLS = f"""
    SELECT i.rollout_id, i.model_call_id, i.writer_id, i.begun_at, r.state,
           (SELECT f.reason FROM incomplete_flags AS f
             WHERE f.rollout_id = i.rollout_id AND f.model_call_id = i.model_call_id
             ORDER BY f.flag_id DESC LIMIT 1) AS reason,
           (SELECT o.outcome FROM build_outcomes AS o WHERE o.outcome_id = {latest_of("r.snapshot_id")}) AS outcome
    FROM call_intents AS i JOIN rollouts AS r ON r.rollout_id = i.rollout_id
    WHERE i.outcome IS NULL ORDER BY i.rowid
"""


@dataclass(frozen=True, slots=True)
class FileHealth:
    """The database file. Sizes in bytes; ``structure_damage`` is None if it was not looked for.

    ``leftovers`` are files beside it of backups that were killed.
    """

    path: str
    size: int
    wal_size: int
    free_size: int
    mode: str
    file_system: str | None
    journal_mode: str
    incremental_vacuum: bool
    schema_revision: str
    application_id: int
    sqlite_version: str
    wal_reset_bug: bool
    structure_damage: tuple[str, ...] | None
    leftovers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerHealth:
    """The database on a server; its size in bytes. ``settings`` are those that a loss of power puts to the test."""

    url: str
    size: int
    version: str
    standby: bool
    settings: dict[str, str]
    schema_revision: str
    problem: str
    """Why a store refuses it; empty if it does not."""


@dataclass(frozen=True, slots=True)
class ProcessHealth:
    """A process that wrote; times in seconds since the epoch."""

    writer_id: str
    pid: int
    host: str
    liveness: Liveness
    started_at: float
    last_seen_at: float


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A call that was begun and of which no tokens were stored.

    ``fate``: ``lost`` (its process died), ``unknown`` (its process cannot be seen from here),
    ``in_flight`` (its process runs), ``overtaken`` (its rollout was frozen while it ran) or
    ``failed`` (flagged with ``reason``). ``outcome`` is the latest outcome on its rollout.
    """

    rollout_id: str
    model_call_id: str
    fate: str
    reason: str | None
    rollout_state: str
    outcome: str | None
    begun_at: float
    writer_id: str
    pid: int
    host: str


@dataclass(slots=True)
class Counted:
    """How many rollouts, the ids of the first few, and how many for which reason."""

    count: int = 0
    examples: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, rollout_id: str, reason: str | None = None) -> None:
        self.count += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(rollout_id)
        if reason:
            self.reasons[reason] += 1


@dataclass(slots=True)
class RolloutHealth:
    """Rollouts by what is still to be done with them."""

    by_state: dict[str, int] = field(default_factory=dict)
    open_with_calls: Counted = field(default_factory=Counted)
    open_without_calls: Counted = field(default_factory=Counted)
    frozen_without_outcome: Counted = field(default_factory=Counted)
    delivered_not_retired: Counted = field(default_factory=Counted)
    marked_since_delivery: Counted = field(default_factory=Counted)
    masked: Counted = field(default_factory=Counted)
    failed: Counted = field(default_factory=Counted)


@dataclass(frozen=True, slots=True)
class Health:
    """Everything that ``examine`` found, of a ``file`` or of a ``server``."""

    examined_at: float
    file: FileHealth | None
    processes: tuple[ProcessHealth, ...]
    open_calls: tuple[OpenCall, ...]
    rollouts: RolloutHealth
    server: ServerHealth | None = None

    @property
    def anybody_writes(self) -> bool:
        """Whether a process that wrote still runs, or did so lately where it cannot be seen."""
        lately = self.examined_at - _LATELY_SECONDS
        return any(
            process.liveness is Liveness.ALIVE
            or (process.liveness is Liveness.UNKNOWN and process.last_seen_at > lately)
            for process in self.processes
        )


def examine(location: Location, *, check_structure: bool = True) -> Health:
    """Collect the facts; ``check_structure`` reads the whole of a file once.

    Raises:
        UnusableDatabaseError: the database is missing, of another program, or damaged beyond reading.
    """
    with reading(location) as connection:
        on_server = isinstance(location, ServerUrl)
        damage = tuple(structure_damage(connection)) if check_structure and not on_server else None
        with transaction(connection):
            clock = Clock.of_server(connection) if on_server else None
            processes = _processes(connection, clock)
            return Health(
                examined_at=time.time() if clock is None else clock.now,
                file=None if isinstance(location, ServerUrl) else _file(connection, location, damage),
                server=_server(connection, location) if isinstance(location, ServerUrl) else None,
                processes=tuple(processes.values()),
                open_calls=_open_calls(connection, processes),
                rollouts=_rollouts(connection),
            )


def _file(connection: Connection, path: Path, damage: tuple[str, ...] | None) -> FileHealth:
    def pragma(name: str) -> int:
        return int(connection.execute(f"PRAGMA {name}").fetchone()[0])

    status = os.stat(path)
    return FileHealth(
        path=str(path),
        size=status.st_size,
        wal_size=wal_bytes(path),
        free_size=pragma("freelist_count") * pragma("page_size"),
        mode=f"{stat.S_IMODE(status.st_mode):04o}",
        file_system=file_system_of(path),
        journal_mode=connection.execute("PRAGMA journal_mode").fetchone()[0],
        incremental_vacuum=pragma("auto_vacuum") == 2,
        schema_revision=HEAD_REVISION,
        application_id=pragma("application_id"),
        sqlite_version=sqlite3.sqlite_version,
        wal_reset_bug=has_wal_reset_bug(),
        structure_damage=damage,
        leftovers=tuple(map(str, abandoned(path.parent, PARTIAL))),
    )


def _server(connection: Connection, url: ServerUrl) -> ServerHealth:
    from token_id_capture.store.postgres.session import facts

    found = facts(connection)
    return ServerHealth(
        url=str(url),
        size=connection.execute("SELECT pg_database_size(current_database())").fetchone()[0],
        version=found.version,
        standby=found.standby,
        settings=found.settings,
        schema_revision=HEAD_REVISION,
        problem=found.problem,
    )


def _processes(connection: Connection, clock: Clock | None) -> dict[str, ProcessHealth]:
    return {
        writer_id: ProcessHealth(
            writer_id, pid, host, liveness(pid, host, booted, started_at, last_seen_at, clock), started_at, last_seen_at
        )
        for writer_id, pid, host, booted, started_at, last_seen_at in connection.execute(_WRITERS)
    }


def _open_calls(connection: Connection, processes: dict[str, ProcessHealth]) -> tuple[OpenCall, ...]:
    calls = []
    for rollout_id, model_call_id, writer_id, begun_at, state, reason, outcome in connection.execute(_OPEN_CALLS):
        process = processes[writer_id]
        calls.append(
            OpenCall(
                rollout_id=rollout_id,
                model_call_id=model_call_id,
                fate=_fate(process.liveness, state, reason),
                reason=reason,
                rollout_state=state,
                outcome=outcome,
                begun_at=begun_at,
                writer_id=writer_id,
                pid=process.pid,
                host=process.host,
            )
        )
    return tuple(calls)


def _fate(liveness: Liveness, state: str, reason: str | None) -> str:
    if reason is not None:
        return "failed"
    if liveness is Liveness.DEAD:
        return "lost"
    if state != State.OPEN:
        return "overtaken"
    return "in_flight" if liveness is Liveness.ALIVE else "unknown"


def _rollouts(connection: Connection) -> RolloutHealth:
    health = RolloutHealth(by_state=dict(connection.execute(_STATES).fetchall()))
    for rollout_id, has_calls in connection.execute(_OPEN_ROLLOUTS):
        (health.open_with_calls if has_calls else health.open_without_calls).add(rollout_id)
    for rollout_id, version, judged_version, outcome, reason in connection.execute(_FROZEN_ROLLOUTS):
        if outcome == Outcome.MASKED:
            health.masked.add(rollout_id, reason)
        elif outcome == Outcome.FAILED:
            health.failed.add(rollout_id, reason)
        elif outcome != Outcome.DELIVERED:
            health.frozen_without_outcome.add(rollout_id)
        elif judged_version == version:
            health.delivered_not_retired.add(rollout_id)
        else:
            health.marked_since_delivery.add(rollout_id)
    return health
