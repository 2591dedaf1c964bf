"""Many processes open a database at once that does not exist yet."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from support.children import Start, until
from support.programs import said

PROCESSES = 12
ROUNDS = int(os.environ.get("COLD_STARTS", "2"))


def test_twelve_processes_open_a_new_file_at_once_and_make_one_schema(start: Start, tmp_path: Path) -> None:
    schemas = set()
    for number in range(ROUNDS):
        database, go = tmp_path / str(number) / "captures.db", tmp_path / f"{number}.go"
        waiting = tmp_path / f"{number}.waiting"
        children = [start("open_together", database, f"process{process}", go, waiting) for process in range(PROCESSES)]
        until(lambda: len(said(waiting)) == PROCESSES, "all to wait")  # noqa: B023
        go.touch()
        for child in children:
            child.succeed()
        with closing(sqlite3.connect(database)) as connection:
            assert connection.execute("SELECT count(*) FROM entries").fetchone() == (PROCESSES,)
            assert connection.execute("SELECT count(*) FROM writers").fetchone() == (PROCESSES,)
            assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            schema = connection.execute("SELECT type, name, sql FROM sqlite_master ORDER BY 1, 2").fetchall()
            schemas.add(tuple(schema) + tuple(connection.execute("SELECT version_num FROM alembic_version")))
    assert len(schemas) == 1
