"""What a rollout is in a database: its rows, table by table, in the order in which they can be written.

A copy has the same ids, times and versions, and its rows come in the same order. Only the numbers that a database
gives its rows by itself are its own.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from sqlalchemy import Table

from token_id_capture.lifecycle import ORIGIN_FIELDS, State
from token_id_capture.store import schema
from token_id_capture.store.maintain.verification import Damage

Row = tuple[Any, ...]

_OWN_NUMBERS: Final = {"flag_id", "snapshot_flag_id", "outcome_id"}

# Wide columns of a call, and what is stored behind them. Its two digests tell whether they are equal.
_DIGESTED: Final = {
    *("content", "extras", "prompt_suffix", "generation", "log_probs", "routed_experts"),
    *ORIGIN_FIELDS,
}


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one table that belong to rollouts, which ``key`` names: ``rollout_id`` or ``snapshot_id``.

    ``columns`` are copied. ``head`` is ``key``, then what tells whether two rows are equal. ``ordered`` says that
    the order in which the rows were stored tells something, ``holds_calls`` that they are calls with their tokens.
    """

    table: Table
    key: str
    columns: tuple[str, ...]
    head: tuple[str, ...]
    ordered: bool
    holds_calls: bool


def _part(table: Table, key: str = "rollout_id", *, ordered: bool = False) -> Part:
    columns = tuple(column.name for column in table.columns if column.name not in _OWN_NUMBERS)
    holds_calls = "payload_digest" in columns and "generation" in columns
    compared = (name for name in columns if name != key and not (holds_calls and name in _DIGESTED))
    return Part(table, key, columns, (key, *compared), ordered, holds_calls)


WRITERS: Final = _part(schema.writers, "writer_id")
"""The processes that the rows of rollouts name. Others may name them too, so a target may have them already."""

_SNAPSHOTS: Final = _part(schema.snapshots)
_SNAPSHOT_ENTRIES: Final = _part(schema.snapshot_entries, "snapshot_id", ordered=True)
_SNAPSHOT_FLAGS: Final = _part(schema.snapshot_flags, "snapshot_id", ordered=True)

PARTS: Final = (
    _part(schema.rollouts),
    WRITERS,
    _part(schema.entries, ordered=True),
    _part(schema.call_intents),
    _part(schema.call_histories),
    _part(schema.incomplete_flags, ordered=True),
    # The copies in a snapshot come before its head, which seals them.
    _SNAPSHOT_ENTRIES,
    _SNAPSHOT_FLAGS,
    _SNAPSHOTS,
    _part(schema.build_outcomes, ordered=True),
    _part(schema.late_writes),
)
"""Everything that belongs to rollouts, in an order that foreign keys and triggers allow."""

NAMING_WRITERS: Final = tuple(part for part in PARTS if part is not WRITERS and "writer_id" in part.columns)

# Whose a snapshot's rows are is known once the snapshots were read.
_COMPARED: Final = sorted((part for part in PARTS if part is not WRITERS), key=lambda part: part is not _SNAPSHOTS)


class DamagedRowsError(Exception):
    """Rows of a source are not as they were stored. Never leaves this package."""

    def __init__(self, damage: Damage) -> None:
        super().__init__(str(damage))
        self.damage = damage


class Rows(Protocol):
    """Reads parts of rollouts; everything that it reads is of one state of its database."""

    def select(self, part: Part, columns: Sequence[str], rollout_ids: Sequence[str]) -> Iterator[Row]:
        """The rows of these rollouts, one at a time; where ``part.ordered``, as they were stored."""
        ...


@dataclass(slots=True)
class Head:
    """What tells a rollout in one database from the same in another, without its tokens.

    ``state`` is None if only outcomes or late writes are left of it. ``calls`` counts those stored.
    ``damage`` says in words which snapshot does not hold what was copied into it.
    """

    state: State | None = None
    calls: int = 0
    damage: str = ""
    _rows: dict[str, list[bytes]] = field(default_factory=lambda: defaultdict(list))

    @property
    def digest(self) -> bytes:
        """Equal if all rows are, and where their order tells something, that too."""
        whole = hashlib.sha256()
        for part in _COMPARED:
            rows = self._rows[part.table.name]
            whole.update(b"".join([part.table.name.encode(), *(rows if part.ordered else sorted(rows))]))
        return whole.digest()

    def add(self, part: Part, row: Row) -> None:
        """Take the next row of a part in."""
        self._rows[part.table.name].append(hashlib.sha256(repr(row).encode()).digest())
        if part.table is schema.rollouts:
            self.state = State(row[part.head.index("state")])
        self.calls += part.table is schema.entries


def heads(rows: Rows, rollout_ids: Sequence[str]) -> dict[str, Head]:
    """The heads of those of the rollouts of which there is anything."""
    found: dict[str, Head] = defaultdict(Head)
    owner: dict[str, str] = {}
    held: Counter[tuple[str, Any, Any]] = Counter()
    declared: list[dict[str, Any]] = []
    for part in _COMPARED:
        version_at = part.head.index("version") if part.key == "snapshot_id" else 0
        for row in rows.select(part, part.head, rollout_ids):
            if part is _SNAPSHOTS:
                declared.append(dict(zip(part.head, row, strict=True)))
                owner[declared[-1]["snapshot_id"]] = row[0]
            if part.key == "snapshot_id":
                held[part.table.name, row[0], row[version_at]] += 1
            found[owner[row[0]] if part.key == "snapshot_id" else row[0]].add(part, row)
    for snapshot in declared:
        key = snapshot["snapshot_id"], snapshot["version"]
        calls, flags = held[_SNAPSHOT_ENTRIES.table.name, *key], held[_SNAPSHOT_FLAGS.table.name, *key]
        if calls != snapshot["entry_count"] or bool(flags) != bool(snapshot["incomplete"]):
            found[snapshot["rollout_id"]].damage = (
                f"version {key[1]} of its snapshot holds {calls} calls of {snapshot['entry_count']}, "
                f"and says incomplete = {snapshot['incomplete']} with {flags} flags"
            )
    return dict(found)
