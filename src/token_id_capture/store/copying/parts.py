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
    """The rows of one table that belong to rollouts.

    ``columns`` are copied; the first names the rollout, also of the copies in a snapshot, whose table in a file
    does not. ``head`` are those that tell whether two rows are equal. ``ordered`` says that the order in which the
    rows were stored tells something, ``holds_calls`` that they are calls with their tokens.
    """

    table: Table
    columns: tuple[str, ...]
    head: tuple[str, ...]
    ordered: bool
    holds_calls: bool


def _part(table: Table, *, ordered: bool = False) -> Part:
    columns = [column.name for column in table.columns if column.name not in (*_OWN_NUMBERS, "rollout_id")]
    if table is not schema.writers:
        columns.insert(0, "rollout_id")
    holds_calls = "payload_digest" in columns and "generation" in columns
    head = tuple(name for name in columns if not (holds_calls and name in _DIGESTED))
    return Part(table, tuple(columns), head, ordered, holds_calls)


WRITERS: Final = _part(schema.writers)
"""The processes that the rows of rollouts name. Others may name them too, so a target may have them already."""

_SNAPSHOTS: Final = _part(schema.snapshots)
_SNAPSHOT_ENTRIES: Final = _part(schema.snapshot_entries, ordered=True)
_SNAPSHOT_FLAGS: Final = _part(schema.snapshot_flags, ordered=True)

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

_COMPARED: Final = tuple(part for part in PARTS if part is not WRITERS)


class LeftOutError(Exception):
    """Rows of a source are not as they were stored, or cannot be stored in the target. Never leaves this package."""

    def __init__(self, damage: Damage) -> None:
        super().__init__(str(damage))
        self.damage = damage


class TryAgainError(Exception):
    """A transaction was rolled back because of what others did meanwhile. Never leaves this package."""


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
    held: Counter[tuple[Any, ...]] = Counter()
    for part in _COMPARED:
        for row in rows.select(part, part.head, rollout_ids):
            head = found[row[0]]
            head.add(part, row)
            if part in (_SNAPSHOT_ENTRIES, _SNAPSHOT_FLAGS):
                values = dict(zip(part.head, row, strict=True))
                held[part.table.name, values["snapshot_id"], values["version"]] += 1
            elif part is _SNAPSHOTS:
                head.damage = head.damage or _difference(dict(zip(part.head, row, strict=True)), held)
    return dict(found)


def _difference(snapshot: dict[str, Any], held: Counter[tuple[Any, ...]]) -> str:
    """What a snapshot says that it holds and does not, in words; its copies were counted before."""
    key = snapshot["snapshot_id"], snapshot["version"]
    calls, flags = held[_SNAPSHOT_ENTRIES.table.name, *key], held[_SNAPSHOT_FLAGS.table.name, *key]
    if calls == snapshot["entry_count"] and bool(flags) == bool(snapshot["incomplete"]):
        return ""
    return (
        f"version {key[1]} of its snapshot holds {calls} calls of {snapshot['entry_count']}, "
        f"and says incomplete = {snapshot['incomplete']} with {flags} flags"
    )
