"""What the database itself refuses, to any program: the stock driver with its stock settings.

Its connections check no foreign keys, and REPLACE fires no delete triggers there.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.frozen import fill
from token_id_capture.store import TokenCaptureStore

IMMUTABLE = "a snapshot is immutable"
EVIDENCE = "is evidence; record the outcome released"
APPEND_ONLY = "outcomes are append-only"
KEPT = "an outcome is kept for as long as its snapshot"

SNAPSHOT_TABLES = ("snapshots", "snapshot_entries", "snapshot_flags")


@pytest.fixture
async def shell(tmp_path: Path) -> Iterator[sqlite3.Connection]:  # type: ignore[misc]
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        await fill(store)
    with contextlib.closing(sqlite3.connect(store.database, isolation_level=None)) as connection:
        yield connection


def columns_of(shell: sqlite3.Connection, table: str) -> list[str]:
    return [row[0] for row in shell.execute("SELECT name FROM pragma_table_info(?)", (table,))]


def everything(shell: sqlite3.Connection) -> list[list[tuple[object, ...]]]:
    return [shell.execute(f"SELECT * FROM {table}").fetchall() for table in (*SNAPSHOT_TABLES, "build_outcomes")]


def refused(shell: sqlite3.Connection, statement: str, why: str) -> None:
    before = everything(shell)
    with pytest.raises(sqlite3.IntegrityError, match=why):
        shell.execute(statement)
    assert everything(shell) == before


@pytest.mark.parametrize("table", SNAPSHOT_TABLES)
def test_no_column_of_a_snapshot_can_be_updated(shell: sqlite3.Connection, table: str) -> None:
    for column in columns_of(shell, table):
        for conflict in ("", "OR REPLACE ", "OR IGNORE "):
            refused(shell, f"UPDATE {conflict}{table} SET {column} = {column}", IMMUTABLE)


@pytest.mark.parametrize("table", SNAPSHOT_TABLES)
@pytest.mark.parametrize("verb", ["INSERT", "INSERT OR REPLACE", "REPLACE", "INSERT OR IGNORE"])
def test_nothing_can_be_inserted_into_a_snapshot_or_replaced_in_it(
    shell: sqlite3.Connection, table: str, verb: str
) -> None:
    refused(shell, f"{verb} INTO {table} SELECT * FROM {table}", IMMUTABLE)


@pytest.mark.parametrize("table", SNAPSHOT_TABLES)
def test_a_row_cannot_be_replaced_by_one_of_another_snapshot(shell: sqlite3.Connection, table: str) -> None:
    columns = columns_of(shell, table)
    chosen = ", ".join("'another'" if name == "snapshot_id" else name for name in columns)
    refused(
        shell,
        f"REPLACE INTO {table} (rowid, {', '.join(columns)}) SELECT rowid, {chosen} FROM {table}",
        IMMUTABLE,
    )


def test_a_call_cannot_be_added_to_a_snapshot(shell: sqlite3.Connection) -> None:
    columns = columns_of(shell, "snapshot_entries")
    chosen = ", ".join("'added'" if name == "model_call_id" else name for name in columns)
    refused(shell, f"INSERT INTO snapshot_entries SELECT {chosen} FROM snapshot_entries LIMIT 1", IMMUTABLE)


@pytest.mark.parametrize("table", SNAPSHOT_TABLES)
@pytest.mark.parametrize("outcome", ["masked", "failed"])
def test_evidence_can_be_deleted_only_after_it_was_released(
    shell: sqlite3.Connection, table: str, outcome: str
) -> None:
    append = (
        "INSERT INTO build_outcomes (snapshot_id, version, rollout_id, outcome, reason, metrics, recorded_at) "
        "SELECT snapshot_id, version, rollout_id, ?, '', '{}', 0 FROM snapshots WHERE rollout_id = 'masked'"
    )
    shell.execute(append, (outcome,))
    of_masked = "WHERE snapshot_id = (SELECT snapshot_id FROM build_outcomes WHERE rollout_id = 'masked')"
    refused(shell, f"DELETE FROM {table} {of_masked}", EVIDENCE)
    refused(shell, f"DELETE FROM {table}", EVIDENCE)
    shell.execute(append, ("released",))
    assert shell.execute(f"DELETE FROM {table} {of_masked}").rowcount > 0


def test_what_was_delivered_can_be_deleted(shell: sqlite3.Connection) -> None:
    of_delivered = "WHERE snapshot_id = (SELECT snapshot_id FROM rollouts WHERE rollout_id = 'delivered')"
    for table in reversed(SNAPSHOT_TABLES):
        shell.execute(f"DELETE FROM {table} {of_delivered}")
    assert shell.execute(f"SELECT count(*) FROM snapshots {of_delivered}").fetchone() == (0,)


def test_outcomes_can_only_be_appended(shell: sqlite3.Connection) -> None:
    for column in columns_of(shell, "build_outcomes"):
        refused(shell, f"UPDATE build_outcomes SET {column} = {column}", APPEND_ONLY)
    for verb in ("REPLACE", "INSERT OR REPLACE", "INSERT OR IGNORE", "INSERT"):
        refused(shell, f"{verb} INTO build_outcomes SELECT * FROM build_outcomes", APPEND_ONLY)
    refused(shell, "DELETE FROM build_outcomes WHERE rollout_id = 'masked'", KEPT)
    refused(shell, "DELETE FROM build_outcomes", KEPT)


def test_an_outcome_may_go_once_its_snapshot_is_gone(shell: sqlite3.Connection) -> None:
    assert shell.execute("DELETE FROM build_outcomes WHERE rollout_id = 'retired'").rowcount == 1
