"""The tables in PostgreSQL: those of ``store.schema``, with the same columns and checks.

What differs: every key begins with ``rollout_id``, so that the tables can be distributed by it; the copies of a
snapshot name their rollout for that. ``rowid``, which SQLite gives every table, is a column. Text sorts by its
bytes, as it does in SQLite and in Python. A writer counts its transactions (``writers.committed``).
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    BIGINT,
    BLOB,
    INTEGER,
    REAL,
    CheckConstraint,
    Column,
    ForeignKeyConstraint,
    Identity,
    Index,
    MetaData,
    PrimaryKeyConstraint,
    Table,
)
from sqlalchemy.dialects.postgresql import BYTEA, DOUBLE_PRECISION, TEXT

from token_id_capture.store import schema

LOCAL_TABLES: Final = ("numbers",)
"""What only SQLite's views need."""

_ORDERED: Final = ("rollouts", "entries", "snapshots", "snapshot_entries", "call_intents", "late_writes")
_COPIES: Final = ("snapshot_entries", "snapshot_flags")
_COUNTED: Final = {"incomplete_flags": "flag_id", "snapshot_flags": "snapshot_flag_id", "build_outcomes": "outcome_id"}
_KEYS: Final = {
    "incomplete_flags": ("rollout_id", "flag_id"),
    "snapshots": ("rollout_id", "snapshot_id", "version"),
    "snapshot_entries": ("rollout_id", "snapshot_id", "version", "model_call_id"),
    "snapshot_flags": ("rollout_id", "snapshot_id", "version", "snapshot_flag_id"),
    "build_outcomes": ("rollout_id", "outcome_id"),
}
# A key of SQLite that does not begin with rollout_id is an index here, and so is the order of storing, of all rollouts
# and of one.
_MORE_INDEXES: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "build_outcomes": {"build_outcomes_by_id": ("outcome_id",)},
    "call_intents": {"call_intents_in_order": ("rowid",)},
    "incomplete_flags": {"incomplete_flags_in_order": ("flag_id",)},
    "late_writes": {"late_writes_in_order": ("rowid",)},
    "snapshots": {"snapshots_by_id": ("snapshot_id", "version"), "snapshots_in_order": ("rowid",)},
    "snapshot_entries": {"snapshot_entries_by_snapshot": ("snapshot_id", "version", "rowid")},
    "entries": {"entries_of_rollout_in_order": ("rollout_id", "rowid"), "entries_in_order": ("rowid",)},
    "rollouts": {"rollouts_in_order": ("rowid",)},
}
_NO_INDEX: Final = {"incomplete_flags_by_rollout", "snapshots_by_rollout"}
"""Their table's key does it."""
_TEXT: Final = TEXT(collation="C")


def postgres_metadata() -> MetaData:
    """The tables as PostgreSQL has them."""
    metadata = MetaData()
    for table in schema.metadata.sorted_tables:
        if table.name not in LOCAL_TABLES:
            _add(metadata, table)
    # A file has it beside itself.
    only = [Column("only_row", INTEGER, CheckConstraint("only_row = 1"), primary_key=True, autoincrement=False)]
    Table("weight_version", metadata, *only, Column("version", _TEXT))
    return metadata


def _add(metadata: MetaData, table: Table) -> None:
    key = _KEYS.get(table.name, tuple(column.name for column in table.primary_key))
    columns = [_column(table.name, column) for column in table.columns]
    if table.name in _COPIES:
        columns.insert(0, Column("rollout_id", _TEXT, nullable=False))
    if table.name in _ORDERED:
        columns.append(Column("rowid", BIGINT, Identity(always=True), nullable=False))
    if table.name == "writers":
        columns.append(Column("committed", BIGINT, nullable=False))
    columns.sort(key=lambda column: key.index(column.name) if column.name in key else len(key))
    of_columns = [one for column in table.columns for one in column.constraints]
    checks = sorted(str(one.sqltext) for one in (*of_columns, *table.constraints) if isinstance(one, CheckConstraint))
    indexes = [
        Index(
            str(one.name),
            *(column.name for column in one.columns),
            postgresql_where=one.dialect_options["sqlite"]["where"],
        )
        for one in table.indexes
        if one.name not in _NO_INDEX
    ]
    indexes += [Index(name, *names) for name, names in _MORE_INDEXES.get(table.name, {}).items()]
    constraints = [PrimaryKeyConstraint(*key), *map(CheckConstraint, checks), *_foreign_keys(table)]
    Table(table.name, metadata, *columns, *constraints, *indexes)


def _column(table: str, column: Column[Any]) -> Column[Any]:
    counted = _COUNTED.get(table) == column.name
    kind: Any = {BLOB: BYTEA(), REAL: DOUBLE_PRECISION(), INTEGER: INTEGER()}.get(type(column.type), _TEXT)
    more = [Identity(always=True)] if counted else []
    return Column(
        column.name,
        BIGINT() if counted else kind,
        *more,
        nullable=bool(column.nullable),
    )


def _foreign_keys(table: Table) -> list[ForeignKeyConstraint]:
    if table.name in _COPIES:
        names = ["rollout_id", "snapshot_id", "version"]
        there = [f"snapshots.{name}" for name in names]
        return [ForeignKeyConstraint(names, there, deferrable=True, initially="DEFERRED")]
    return [
        ForeignKeyConstraint([one.parent.name], [f"{one.column.table.name}.{one.column.name}"])
        for one in sorted(table.foreign_keys, key=lambda one: one.parent.name)
    ]
