"""Counting reads no blob: each look at the calls is answered by an index alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from token_id_capture.store import TokenCaptureStore
from token_id_capture.store.file.read_only import read_only
from token_id_capture.store.maintain import health

STATEMENTS = [name for name, value in vars(health).items() if isinstance(value, str) and "SELECT" in value.upper()
              and name.startswith("_") and name.isupper()]  # fmt: skip


@pytest.mark.parametrize("name", STATEMENTS)
async def test_no_statement_reads_the_rows_that_hold_blobs(tmp_path: Path, name: str) -> None:
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        await store.begin_call("math-0", "c0")
    with read_only(store.database) as connection:
        plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {getattr(health, name)}")]
    steps = [step for step in plan if re.search(r"\b(e|entries|snapshot_entries)\b", step)]
    assert all("COVERING INDEX" in step for step in steps), plan
    # Nor is anything scanned for each row of another table.
    assert not [step for step in plan[1:] if step.startswith("SCAN")], plan


def test_the_statements_were_found() -> None:
    assert {"_STATES", "_OPEN_ROLLOUTS", "_FROZEN_ROLLOUTS", "_OPEN_CALLS", "_WRITERS"} <= set(STATEMENTS)
