"""Make a database with very many rollouts, for tests and measurements at scale.

Twenty rollouts are written through the store, one of each fate. All others are copies of their rows
with ids and times of their own: no digest covers those, so every copy reads back and verifies.
"""

from __future__ import annotations

import argparse
import asyncio
import sqlite3
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from scale.templates import STARTED, Shape, write_long_rollout, write_templates
from token_id_capture import TokenCaptureStore
from token_id_capture.store.file.connections import writing_engine
from token_id_capture.store.file.lock import WriterLock

LONG_ROLLOUT: Final = "zz-long"
SECONDS_APART: Final = 5.0
_BATCH: Final = 5_000

_IDS: Final = {
    "rollout_id": "printf('rollout-%07d', i.n)",
    "snapshot_id": "substr(t.snapshot_id, 1, 16) || printf('%016x', i.n)",
    "incarnation": "substr(t.incarnation, 1, 16) || printf('%016x', i.n)",
    "model_call_id": "iif(t.model_call_id = '', '', printf('%024x', i.n) || t.model_call_id)",
    "prefix_call_id": "printf('%024x', i.n) || t.prefix_call_id",
    "flag_id": "NULL",
    "snapshot_flag_id": "NULL",
    "outcome_id": "NULL",
}
_TIMES: Final = ("opened_at", "frozen_at", "retired_at", "stored_at", "begun_at", "flagged_at", "attempted_at")

# Copies of a snapshot come before its head, which seals them.
_TABLES: Final = (
    *("rollouts", "entries", "call_intents", "call_histories", "incomplete_flags", "late_writes"),
    *("snapshot_entries", "snapshot_flags", "snapshots", "build_outcomes"),
)
_SNAPSHOT_ONLY: Final = {"snapshot_entries", "snapshot_flags"}


def make_database(path: Path, rollouts: int, shape: Shape) -> None:
    """Create ``path`` with ``rollouts`` rollouts and one long one, ``LONG_ROLLOUT``.

    Raises:
        FileExistsError: there is something already.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists")
    templates = asyncio.run(_write_templates(path, shape))
    engine = writing_engine(path)
    writer_lock = WriterLock(path)
    try:
        with _one_transaction(engine, writer_lock) as connection:
            _load_templates(connection, templates)
            _forget_templates(connection)
        for first in range(0, rollouts, _BATCH):
            with _one_transaction(engine, writer_lock) as connection:
                _copy(connection, first, min(first + _BATCH, rollouts), len(templates))
        with _one_transaction(engine, writer_lock) as connection:
            for table in ("numbering", *(f"template_{table}" for table in _TABLES)):
                connection.execute(f"DROP TABLE {table}")
    finally:
        engine.dispose()
        writer_lock.close()
    asyncio.run(_write_long(path))


async def _write_templates(path: Path, shape: Shape) -> list[str]:
    async with TokenCaptureStore(path) as store:
        return await write_templates(store, shape)


async def _write_long(path: Path) -> None:
    async with TokenCaptureStore(path) as store:
        await write_long_rollout(store, LONG_ROLLOUT)


@contextmanager
def _one_transaction(engine: object, writer_lock: WriterLock) -> Iterator[sqlite3.Connection]:
    with writer_lock, engine.begin() as connection:  # type: ignore[attr-defined]
        yield connection.connection.driver_connection


def _load_templates(connection: sqlite3.Connection, templates: list[str]) -> None:
    """Copy the templates' rows aside, each with the number of its rollout."""
    connection.execute("CREATE TABLE numbering (rollout_id TEXT PRIMARY KEY, template INTEGER, opened_at REAL)")
    connection.executemany(
        "INSERT INTO numbering SELECT rollout_id, ?, opened_at FROM rollouts WHERE rollout_id = ?",
        list(enumerate(templates)),
    )
    for table in _TABLES:
        rollout_of = "t.rollout_id"
        if table in _SNAPSHOT_ONLY:
            rollout_of = "(SELECT s.rollout_id FROM snapshots AS s WHERE s.snapshot_id = t.snapshot_id)"
        connection.execute(
            f"CREATE TABLE template_{table} AS "
            f"SELECT t.*, m.template AS template_, m.opened_at AS opened_ "
            f"FROM {table} AS t JOIN numbering AS m ON m.rollout_id = {rollout_of}"
        )
        connection.execute(f"CREATE INDEX by_template_{table} ON template_{table} (template_)")


def _forget_templates(connection: sqlite3.Connection) -> None:
    """Delete the templates themselves; masked ones are evidence and go the administrative way."""
    connection.execute(
        "INSERT INTO build_outcomes (snapshot_id, version, rollout_id, outcome, reason, metrics, recorded_at) "
        "SELECT DISTINCT snapshot_id, version, rollout_id, 'released', 'template', '{}', 0 FROM snapshots"
    )
    connection.execute("PRAGMA defer_foreign_keys = ON")
    for table in reversed(_TABLES):
        connection.execute(f"DELETE FROM {table}" if table != "build_outcomes" else "SELECT 1")
    connection.execute("DELETE FROM build_outcomes")


def _copy(connection: sqlite3.Connection, first: int, last: int, templates: int) -> None:
    connection.execute("PRAGMA defer_foreign_keys = ON")
    for table in _TABLES:
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        values = ", ".join(_value(table, column) for column in columns)
        connection.execute(
            "WITH RECURSIVE i(n) AS (SELECT :first UNION ALL SELECT n + 1 FROM i WHERE n + 1 < :last) "
            f"INSERT INTO {table} ({', '.join(columns)}) "
            f"SELECT {values} FROM i CROSS JOIN template_{table} AS t ON t.template_ = i.n % :templates "
            "ORDER BY i.n, t.rowid",
            {"first": first, "last": last, "templates": templates, "started": STARTED, "apart": SECONDS_APART},
        )


def _value(table: str, column: str) -> str:
    if column in _IDS:
        return _IDS[column]
    if column in _TIMES or (table, column) == ("build_outcomes", "recorded_at"):
        return f"t.{column} - t.opened_ + :started + :apart * i.n"
    return f"t.{column}"


def main() -> None:
    """Run ``scripts/make_database``."""
    parser = argparse.ArgumentParser(prog="scripts/make_database", description=__doc__)
    parser.add_argument("database", type=Path, help="the file to make")
    parser.add_argument("--rollouts", type=int, default=100_000, metavar="N")
    parser.add_argument("--calls", type=int, default=Shape.calls, metavar="N", help="calls of a rollout")
    parser.add_argument(
        "--new", type=int, default=Shape.new_prompt_tokens, metavar="N", help="prompt tokens a call adds"
    )
    parser.add_argument(
        "--generated", type=int, default=Shape.generated_tokens, metavar="N", help="tokens a call samples"
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # about this machine's SQLite
    begun = time.perf_counter()
    try:
        make_database(
            arguments.database, arguments.rollouts, Shape(arguments.calls, arguments.new, arguments.generated)
        )
    except FileExistsError as error:
        parser.error(str(error))
    size = arguments.database.stat().st_size
    print(
        f"{arguments.database}: {arguments.rollouts:,} rollouts, {size / 1e6:,.0f} MB, "
        f"{time.perf_counter() - begun:.1f} s"
    )


if __name__ == "__main__":
    main()
