"""Damages copies of a sound database in every way that the check must see."""

from __future__ import annotations

import shutil
import sqlite3
import time
from contextlib import closing

from torturing.check import Findings, check
from torturing.plan import Plan, Round
from torturing.supervise import run_in_child
from torturing.work import run_once

_ENTRY = """
    SELECT rowid FROM entries AS e WHERE generation_length > 0
    AND rollout_id IN (SELECT rollout_id FROM rollouts WHERE state = 'open')
    AND NOT EXISTS (
        SELECT 1 FROM entries AS later WHERE later.rollout_id = e.rollout_id AND later.prefix_call_id = e.model_call_id
    )
    LIMIT 1
"""

DAMAGES = {
    "an entry is gone": ("lost", f"DELETE FROM entries WHERE rowid = ({_ENTRY})"),
    "a log probability has changed": (
        "torn",
        f"UPDATE entries SET log_probs = CAST(X'A5' || substr(log_probs, 2) AS BLOB) WHERE rowid = ({_ENTRY})",
    ),
    "a token has changed": (
        "torn",
        f"UPDATE entries SET generation = CAST(X'A5' || substr(generation, 2) AS BLOB) WHERE rowid = ({_ENTRY})",
    ),
    "an extra field has changed": (
        "torn",
        f"UPDATE entries SET extras = json_set(extras, '$.sampling.temperature', 0.5) WHERE rowid = ({_ENTRY})",
    ),
    "a flag is gone": ("lost", "DELETE FROM incomplete_flags"),
    "intents are gone": ("lost", "DELETE FROM call_intents"),
    "a copy is gone from a snapshot": (
        "torn",
        "DELETE FROM snapshot_entries WHERE rowid = (SELECT max(rowid) FROM snapshot_entries)",
    ),
    "a snapshot has changed": ("torn", "UPDATE snapshots SET incomplete = 1 - incomplete"),
    "a retired rollout is open again": ("returned", "UPDATE rollouts SET state = 'open' WHERE state = 'retired'"),
    "a rollout was retired unasked": ("lost", "UPDATE rollouts SET state = 'retired' WHERE state = 'open'"),
    "a rollout is gone": ("lost", "DELETE FROM rollouts WHERE state = 'open'"),
}


def self_test(plan: Plan) -> Findings:
    """Store a little of everything, and see that each damage to it is found, and that it is sound without."""
    part = Round(plan, 0, time.monotonic())
    if not run_in_child(lambda: run_once(part)):
        findings = Findings()
        findings.add("error", "the calls for the self-test could not be stored; the output says why")
        return findings
    findings = check(plan.database, plan.ledgers)
    for name, (kind, statement) in DAMAGES.items():
        if not _is_found(plan, kind, statement):
            findings.add("unseen", f"the check does not see that {name}")
    return findings


def _is_found(plan: Plan, kind: str, statement: str) -> bool:
    copy = plan.directory / "damaged.db"
    shutil.copyfile(plan.database, copy)
    with closing(sqlite3.connect(copy, isolation_level=None)) as connection:
        for (trigger,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            connection.execute(f"DROP TRIGGER {trigger}")
        damaged = connection.execute(statement).rowcount
    found = check(copy, plan.ledgers).count_of(kind)
    for path in plan.directory.glob("damaged.db*"):
        path.unlink()
    return damaged > 0 and found > 0
