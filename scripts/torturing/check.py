"""Compares the database with the ledger, once nobody writes any more."""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from token_id_capture import reasons
from token_id_capture.errors import CorruptCaptureError
from token_id_capture.store.codec import unpack_rollout
from torturing.ledger import Line, read_ledgers
from torturing.records import digest_of, entry_of
from torturing.work import REFUSED_SALT


@dataclass(slots=True)
class Findings:
    """What the ledger counts, and everything that contradicts it, by kind."""

    counts: Counter[str] = field(default_factory=Counter)
    violations: list[tuple[str, str]] = field(default_factory=list)

    def add(self, kind: str, what: str) -> None:
        self.violations.append((kind, what))

    def count_of(self, kind: str) -> int:
        return sum(1 for found, _ in self.violations if found == kind)


@dataclass(slots=True)
class Stored:
    """What the database holds of one rollout."""

    state: str
    snapshot_id: str | None
    version: int
    calls: set[str] = field(default_factory=set)
    flags: set[tuple[str, str, str]] = field(default_factory=set)
    intents: dict[str, str | None] = field(default_factory=dict)
    snapshots: dict[tuple[str, int], tuple[bool, set[str]]] = field(default_factory=dict)


def check(database: Path, ledgers: Path) -> Findings:
    """Everything acknowledged is there, or was dropped with a snapshot that held it; nothing is half there."""
    findings = Findings()
    of_rollout: dict[str, list[Line]] = defaultdict(list)
    for line in read_ledgers(ledgers):
        findings.counts[line.kind] += 1
        if line.kind == "error":
            findings.add("error", line.detail)
        elif line.kind == "half":
            findings.add("torn", f"a reader saw {line.rollout_id} half there ({line.snapshot_id}, {line.version})")
        else:
            of_rollout[line.rollout_id].append(line)
    with closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.row_factory = sqlite3.Row
        _check_structure(connection, findings)
        names = {row[0] for row in connection.execute("SELECT rollout_id FROM rollouts")}
        for rollout_id in sorted(names | set(of_rollout)):
            stored = _stored(connection, rollout_id, findings)
            _check_rollout(rollout_id, of_rollout[rollout_id], stored, findings)
    return findings


def _check_structure(connection: sqlite3.Connection, findings: Findings) -> None:
    for (answer,) in connection.execute("PRAGMA integrity_check"):
        if answer != "ok":
            findings.add("torn", f"integrity_check: {answer}")
    for row in connection.execute("PRAGMA foreign_key_check"):
        findings.add("torn", f"foreign_key_check: {tuple(row)}")


def _stored(connection: sqlite3.Connection, rollout_id: str, findings: Findings) -> Stored | None:
    of_rollout = "WHERE rollout_id = ?", (rollout_id,)
    head = _rows(connection, "SELECT state, snapshot_id, version FROM rollouts", *of_rollout)
    if not head:
        return None
    stored = Stored(*head[0])
    rows = _rows(connection, "SELECT * FROM entries", *of_rollout)
    stored.calls = _intact(rollout_id, rows, "", findings)
    for row in _rows(connection, "SELECT model_call_id, reason, detail FROM incomplete_flags", *of_rollout):
        stored.flags.add(tuple(row))
    intents = _rows(connection, "SELECT model_call_id, outcome FROM call_intents", *of_rollout)
    stored.intents = {row["model_call_id"]: row["outcome"] for row in intents}
    for row in _rows(connection, "SELECT * FROM snapshots", *of_rollout):
        key = row["snapshot_id"], row["version"]
        of_snapshot = "WHERE snapshot_id = ? AND version = ?", key
        rows = _rows(connection, "SELECT * FROM snapshot_entries", *of_snapshot)
        calls = _intact(rollout_id, rows, f" in snapshot {key}", findings)
        flags = _rows(connection, "SELECT 1 FROM snapshot_flags", *of_snapshot)
        if len(rows) != row["entry_count"] or bool(flags) != bool(row["incomplete"]):
            counted = f"{len(rows)} of {row['entry_count']} entries, {len(flags)} flags"
            findings.add("torn", f"snapshot {key} of {rollout_id} is half there: {counted}")
        stored.snapshots[key] = bool(row["incomplete"]), calls
    return stored


def _rows(connection: sqlite3.Connection, select: str, where: str, key: tuple[object, ...]) -> list[sqlite3.Row]:
    return connection.execute(f"{select} {where}", key).fetchall()


def _intact(rollout_id: str, rows: list[sqlite3.Row], where: str, findings: Findings) -> set[str]:
    """The calls of these rows; every one must be, byte for byte, what its ids say."""
    try:
        entries = unpack_rollout(rollout_id, [dict(row) for row in rows])
    except CorruptCaptureError as error:
        findings.add("torn", f"{error}{where}")
        return {row["model_call_id"] for row in rows}
    for entry in entries:
        if digest_of(entry) != digest_of(entry_of(rollout_id, entry.model_call_id)):
            findings.add("torn", f"call {entry.model_call_id} of {rollout_id}{where} is not what was stored")
    return {entry.model_call_id for entry in entries}


def _check_rollout(rollout_id: str, lines: list[Line], stored: Stored | None, findings: Findings) -> None:
    by_kind: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        by_kind[line.kind].append(line)
    for kind, what in _contradictions(by_kind, stored):
        findings.add(kind, f"{rollout_id}: {what}")


def _contradictions(by_kind: dict[str, list[Line]], stored: Stored | None) -> Iterator[tuple[str, str]]:
    if stored is None:
        for line in _acknowledged(by_kind, "put", "begin", "mark"):
            yield "lost", f"the rollout, with {line.kind} {line.call_id or line.detail}"
        return
    for put in by_kind["put"]:
        if put.detail != digest_of(entry_of(put.rollout_id, put.call_id)):
            yield "torn", f"call {put.call_id} was handed over as something else"
    yield from _freezes_hold_what_was_before(by_kind)
    if stored.state == "retired":
        yield from _retired_rightly(by_kind, stored)
    else:
        yield from _nothing_missing(by_kind, stored)
        if any(drop.done for drop in by_kind["drop"]):
            yield "returned", f"was dropped, and is {stored.state} again"


def _acknowledged(by_kind: dict[str, list[Line]], *kinds: str) -> Iterable[Line]:
    return (line for kind in kinds for line in by_kind[kind])


def _nothing_missing(by_kind: dict[str, list[Line]], stored: Stored) -> Iterator[tuple[str, str]]:
    for put in by_kind["put"]:
        if put.call_id not in stored.calls:
            yield "lost", f"the entry of call {put.call_id}"
    for begin in by_kind["begin"]:
        if begin.call_id not in stored.calls and begin.call_id not in stored.intents:
            yield "lost", f"the intent of call {begin.call_id}"
    for refuse in by_kind["refuse"]:
        if stored.intents.get(refuse.call_id) != "refused":
            yield "lost", f"the refusal of call {refuse.call_id}"
    for mark in by_kind["mark"]:
        if ("", reasons.LOST_STREAM, mark.detail) not in stored.flags:
            yield "lost", f"the mark {mark.detail}"
    conflicts = {call for call, reason, _ in stored.flags if reason == reasons.CONFLICTING_PAYLOAD}
    for conflict in by_kind["conflict"]:
        if conflict.call_id not in conflicts:
            yield "lost", f"the flag of the conflict of call {conflict.call_id}"
    for freeze in by_kind["freeze"]:
        key = freeze.snapshot_id, freeze.version
        if key not in stored.snapshots:
            yield "lost", f"snapshot {key}"
        elif stored.snapshots[key] != (freeze.incomplete, set(freeze.calls)):
            yield "torn", f"snapshot {key} is not the one that was given out"


def _freezes_hold_what_was_before(by_kind: dict[str, list[Line]]) -> Iterator[tuple[str, str]]:
    """Every freeze holds every entry that was ever acknowledged: there are none after the first freeze."""
    freezes = by_kind["freeze"]
    if len({freeze.snapshot_id for freeze in freezes}) > 1:
        yield "torn", "two snapshot ids"
    given: dict[int, Line] = {}
    for freeze in freezes:
        first = given.setdefault(freeze.version, freeze)
        if (first.incomplete, first.calls) != (freeze.incomplete, freeze.calls):
            yield "torn", f"version {freeze.version} was given out in two forms"
    for freeze in given.values():
        held = set(freeze.calls)
        for put in by_kind["put"]:
            if put.call_id not in held:
                order = "was acknowledged before" if put.ended < freeze.started else "was accepted in spite of"
                yield "lost", f"call {put.call_id} {order} the freeze to version {freeze.version}, which lacks it"
    for freeze in freezes:
        if not freeze.incomplete:
            yield from (
                ("lost", f"version {freeze.version} is complete, in spite of {hole}")
                for hole in _holes(by_kind, freeze)
            )


def _holes(by_kind: dict[str, list[Line]], freeze: Line) -> Iterator[str]:
    """What was acknowledged before a freeze and makes the rollout incomplete."""
    held = set(freeze.calls)
    for line in _acknowledged(by_kind, "mark", "conflict"):
        if line.ended < freeze.started:
            yield f"the {line.kind} {line.call_id or line.detail}"
    for begin in by_kind["begin"]:
        refused = begin.call_id.split("-", 2)[2].startswith(REFUSED_SALT)
        if begin.ended < freeze.started and begin.call_id not in held and not refused:
            yield f"the call {begin.call_id}, which was begun and never stored"


def _retired_rightly(by_kind: dict[str, list[Line]], stored: Stored) -> Iterator[tuple[str, str]]:
    if stored.calls or stored.flags or stored.intents or stored.snapshots:
        yield "returned", "is retired, and has content"
    key = stored.snapshot_id, stored.version
    proof = next((freeze for freeze in by_kind["freeze"] if (freeze.snapshot_id, freeze.version) == key), None)
    if not any((line.snapshot_id, line.version) == key for line in by_kind["dropping"]):
        yield "lost", f"was retired as version {stored.version}, and nobody had asked for that"
    for drop in by_kind["drop"]:
        if drop.done and (drop.snapshot_id, drop.version) != key:
            yield "lost", f"was retired as version {stored.version} by a drop of version {drop.version}"
    for line in _acknowledged(by_kind, "mark", "conflict"):
        # It raised the version, so a snapshot without it was out of date and could not be dropped.
        if proof is not None and not proof.incomplete:
            yield "lost", f"was dropped as complete, in spite of the {line.kind} {line.call_id or line.detail}"
    dropped = min((drop.ended for drop in by_kind["drop"] if drop.done), default=None)
    if dropped is not None:
        for line in _acknowledged(by_kind, "put", "begin", "mark", "freeze", "conflict"):
            if line.started > dropped:
                yield "returned", f"{line.kind} {line.call_id} was accepted after the drop"
