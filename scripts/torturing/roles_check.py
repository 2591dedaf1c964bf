"""What must hold once every role was killed again and again."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from token_id_capture.store.maintain.verification import Checked, verify
from torturing.check import Findings

_STATES = """
    SELECT r.rollout_id, r.state, (SELECT count(*) FROM entries AS e WHERE e.rollout_id = r.rollout_id),
           (SELECT count(*) FROM call_intents AS i WHERE i.rollout_id = r.rollout_id AND i.outcome IS NULL)
    FROM rollouts AS r
"""


def check_roles(directory: Path, database: Path, findings: Findings) -> None:
    """Nothing acknowledged is lost, what is retired is in a row, rows are whole, and every file is sound."""
    with closing(sqlite3.connect(database)) as connection:
        stored = {row[0]: row[1:] for row in connection.execute(_STATES)}
        for (answer,) in connection.execute("PRAGMA integrity_check"):
            if answer != "ok":
                findings.add("torn", f"integrity_check: {answer}")
    for damage in verify(database, Checked()):
        findings.add("torn", str(damage))
    rows = _rows(directory, findings)
    finished = _lines(directory / "finished")
    findings.counts["finished rollouts"] += len(finished)
    for rollout_id in finished:
        _check_rollout(rollout_id, stored.get(rollout_id), rows.get(rollout_id), findings)
    answered = Counter(_lines(directory / "answered"))
    findings.counts["answered calls"] += answered.total()
    for rollout_id, calls in answered.items():
        state, entries, _ = stored.get(rollout_id, ("gone", 0, 0))
        if entries < calls:
            findings.add("lost", f"{rollout_id} is {state} with {entries} calls of {calls} that were answered")
    for copy in directory.glob("backup-*.db"):
        findings.counts["whole backups"] += 1
        for damage in verify(copy, Checked(), nobody_writes=True):
            findings.add("torn", f"{copy.name}: {damage}")


def _check_rollout(rollout_id: str, stored: Any, row: Any, findings: Findings) -> None:
    state, entries, begun = stored or ("gone", 0, 0)
    if row is not None and (row["mask_sample"] or row["_ng_token_capture"]["n_calls"] != 3):
        findings.add("torn", f"the row of {rollout_id} is not of 3 calls, or masked: {row['_ng_token_capture']}")
    elif row is None and state in ("retired", "gone"):
        findings.add("lost", f"{rollout_id} is {state}, and in no row")
    elif state in ("open", "frozen") and (entries, begun) != (3, 0):
        findings.add("lost", f"{rollout_id} is {state} with {entries} calls of 3, and {begun} begun")


def _rows(directory: Path, findings: Findings) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for path in directory.glob("rows-*.jsonl"):
        lines = path.read_bytes().split(b"\n")
        for line in lines[:-1]:  # what a kill cut short has no newline, and is cut off by the next run
            row = json.loads(line)
            if row["rollout_id"] in rows:
                findings.add("torn", f"{row['rollout_id']} has two rows")
            rows[row["rollout_id"]] = row
    findings.counts["rows"] += len(rows)
    return rows


def _lines(path: Path) -> list[str]:
    return path.read_text().split("\n")[:-1] if path.exists() else []
