"""Check what is stored against the digests that were stored with it, and name what is damaged.

The structure of the file comes first (``integrity_check`` and ``foreign_key_check``, one read each),
then every call of every rollout and snapshot. Calls are read one at a time and rollouts in
transactions of their own, so memory stays flat and the WAL is never pinned for long; what is
retired meanwhile is passed over. The structure of tables on a server is the server's to check (pg_amcheck).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final

from token_id_capture.lifecycle import State
from token_id_capture.records import TOKEN_ENTRY_RECORD_SCHEMA_VERSION
from token_id_capture.store.codec import PAYLOAD_MISMATCH, UNREADABLE, stored_payload_digest
from token_id_capture.store.driver import Connection, by_name, is_damage
from token_id_capture.store.file.read_only import read_only, transaction
from token_id_capture.store.read.queries import ENTRY_ROW
from token_id_capture.store.reading import Location, reading
from token_id_capture.store.sequence_walk import SequenceWalk
from token_id_capture.store.server_url import ServerUrl

Progress = Callable[[str, int, int | None], None]
"""``progress(what, done, total)``; a total of None means that nobody knows."""

_ROLLOUTS_PER_PAGE: Final = 200
_MESSAGES: Final = 100

_COUNT = f"SELECT count(*) FROM rollouts WHERE state IN ('{State.OPEN}', '{State.FROZEN}')"
_PAGE = "SELECT rollout_id FROM rollouts WHERE rollout_id > ? ORDER BY rollout_id LIMIT ?"
_ROLLOUT = "SELECT state, version, snapshot_id FROM rollouts WHERE rollout_id = ?"
_SNAPSHOTS = """
    SELECT snapshot_id, version, entry_count, incomplete,
           (SELECT count(*) FROM snapshot_entries AS e WHERE e.snapshot_id = s.snapshot_id AND e.version = s.version)
             AS entries,
           (SELECT count(*) FROM snapshot_flags AS f WHERE f.snapshot_id = s.snapshot_id AND f.version = s.version)
             AS flags
    FROM snapshots AS s WHERE rollout_id = ? ORDER BY snapshot_id, version
"""
# A call is always longer than the one that its prompt continues, which is therefore seen before it.
_CALLS = "SELECT model_call_id FROM {source} ORDER BY prompt_length, model_call_id"
_CALL = f"SELECT {', '.join(ENTRY_ROW)} FROM {{source}} AND model_call_id = ?"


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that is not as it was stored. Empty fields do not apply.

    ``snapshot_id`` and ``version`` say that it is the copy in a snapshot, not the captured call.
    """

    what: str
    rollout_id: str = ""
    model_call_id: str = ""
    snapshot_id: str = ""
    version: int | None = None

    def __str__(self) -> str:
        if not self.rollout_id:
            return self.what
        call = f"call {self.model_call_id} of " if self.model_call_id else ""
        place = f" in snapshot {self.snapshot_id} version {self.version}" if self.snapshot_id else ""
        return f"{call}rollout {self.rollout_id}{place}: {self.what}"


@dataclass(slots=True)
class Checked:
    """How much was checked so far."""

    rollouts: int = 0
    calls: int = 0
    snapshots: int = 0
    snapshot_calls: int = 0


@dataclass(slots=True)
class _Source:
    """Where the calls of one rollout, or of one version of its snapshot, are."""

    rollout_id: str
    snapshot_id: str
    version: int | None
    rows: str
    key: tuple[Any, ...]
    walk: SequenceWalk = field(default_factory=SequenceWalk)

    def damage(self, what: str, model_call_id: str = "") -> Damage:
        return Damage(what, self.rollout_id, model_call_id, self.snapshot_id, self.version)


def verify(
    location: Location,
    checked: Checked,
    progress: Progress = lambda what, done, total: None,
    *,
    nobody_writes: bool = False,
) -> Iterator[Damage]:
    """Check the whole database; ``checked`` counts along. The iterator is empty if nothing is damaged.

    Args:
        nobody_writes: the caller alone knows this file; see ``read_only``.

    Raises:
        UnusableDatabaseError: it cannot be read as a capture database at all.
    """
    with _opened(location, nobody_writes) as connection:
        if not isinstance(location, ServerUrl):
            progress("structure", 0, None)
            yield from _structure(connection)
        total = connection.execute(_COUNT).fetchone()[0]
        progress("calls", 0, total)
        after = ""
        while page := [row[0] for row in connection.execute(_PAGE, (after, _ROLLOUTS_PER_PAGE))]:
            for rollout_id in page:
                yield from _rollout(connection, rollout_id, checked)
                progress("calls", checked.rollouts, max(total, checked.rollouts))
            after = page[-1]


def _opened(location: Location, nobody_writes: bool) -> AbstractContextManager[Connection]:
    if nobody_writes and not isinstance(location, ServerUrl):
        return read_only(location, nobody_writes=True)
    return reading(location)


def structure_damage(connection: Connection) -> list[str]:
    """What ``integrity_check`` says, in words; empty if the file is sound.

    It compares indexes with their tables, which ``quick_check`` does not: a call that an index lacks is not read.
    """
    try:
        messages = [row[0] for row in connection.execute(f"PRAGMA integrity_check({_MESSAGES})")]
    except sqlite3.DatabaseError as error:
        messages = [str(error)]
    # One message may be several lines, under a heading that names the database in SQLite's words.
    lines = [line.strip() for message in messages for line in str(message).splitlines()]
    return [line for line in lines if line and line != "ok" and not line.startswith("***")]


def _structure(connection: Connection) -> Iterator[Damage]:
    for message in structure_damage(connection):
        yield Damage(f"the structure of the file is damaged: {message}")
    try:
        for table, rowid, parent, _ in connection.execute("PRAGMA foreign_key_check"):
            yield Damage(f"row {rowid} of {table} refers to a row of {parent} that does not exist")
    except sqlite3.DatabaseError as error:
        yield Damage(f"foreign keys cannot be checked: {error}")


def _rollout(connection: Connection, rollout_id: str, checked: Checked) -> Iterator[Damage]:
    damages: list[Damage] = []
    try:
        with transaction(connection):
            rollouts = by_name(connection.execute(_ROLLOUT, (rollout_id,)))
            if not rollouts or rollouts[0]["state"] == State.RETIRED:
                return
            checked.rollouts += 1
            damages.extend(_rollout_now(connection, rollout_id, rollouts[0], checked))
    except Exception as error:
        if not is_damage(error):
            raise
        damages.append(Damage(f"cannot be read ({error})", rollout_id))
    # The caller may take its time over each, and the transaction must not wait for it.
    yield from damages


def _rollout_now(
    connection: Connection, rollout_id: str, rollout: dict[str, Any], checked: Checked
) -> Iterator[Damage]:
    source = _Source(rollout_id, "", None, "entries WHERE rollout_id = ?", (rollout_id,))
    yield from _calls(connection, source)
    checked.calls += len(source.walk)
    snapshots = by_name(connection.execute(_SNAPSHOTS, (rollout_id,)))
    if rollout["state"] == State.FROZEN and rollout["snapshot_id"] not in {row["snapshot_id"] for row in snapshots}:
        yield source.damage(f"is frozen, but its snapshot {rollout['snapshot_id']} does not exist")
    for row in snapshots:
        yield from _snapshot(connection, rollout_id, row, checked)


def _snapshot(connection: Connection, rollout_id: str, row: dict[str, Any], checked: Checked) -> Iterator[Damage]:
    key = row["snapshot_id"], row["version"]
    source = _Source(rollout_id, *key, "snapshot_entries WHERE snapshot_id = ? AND version = ?", key)
    if row["entries"] != row["entry_count"]:
        yield source.damage(f"holds {row['entries']} calls, and {row['entry_count']} were copied into it")
    if row["incomplete"] != (row["flags"] > 0):
        yield source.damage(f"says incomplete = {row['incomplete']}, and has {row['flags']} flags")
    yield from _calls(connection, source)
    checked.snapshots += 1
    checked.snapshot_calls += len(source.walk)


def _calls(connection: Connection, source: _Source) -> Iterator[Damage]:
    call_ids = [row[0] for row in connection.execute(_CALLS.format(source=source.rows), source.key)]
    statement = _CALL.format(source=source.rows)
    for call_id in call_ids:
        try:
            rows = by_name(connection.execute(statement, (*source.key, call_id)))
            problems = problems_of_call(rows[0], source.walk) if rows else ["is missing from its index"]
        except Exception as error:
            if not (isinstance(error, UNREADABLE) or is_damage(error)):
                raise
            problems = [f"cannot be read ({error})"]
        for problem in problems:
            yield source.damage(problem, call_id)


def problems_of_call(row: dict[str, Any], walk: SequenceWalk) -> list[str]:
    """What is not as it was stored in the next call of a walk, in words.

    Raises:
        what is in ``codec.UNREADABLE``: a column cannot be decoded.
    """
    if row["schema_version"] > TOKEN_ENTRY_RECORD_SCHEMA_VERSION:
        return [f"is a record of version {row['schema_version']}: upgrade token-id-capture to check it"]
    problem = walk.problem(row)
    problems = [problem] if problem else []
    if stored_payload_digest(row) != row["payload_digest"]:
        problems.append(PAYLOAD_MISMATCH)
    return problems
