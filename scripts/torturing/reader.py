"""What the reader process does: it holds read transactions open, and looks around inside them."""

from __future__ import annotations

import os
import random
import sqlite3
import time
from mmap import mmap

from torturing.ledger import Ledger
from torturing.plan import Round

LONGEST_SECONDS = 2.0

_HALF_SNAPSHOTS = """
    SELECT s.rollout_id, s.snapshot_id, s.version FROM snapshots AS s
    WHERE s.entry_count != (
        SELECT count(*) FROM snapshot_entries AS e WHERE e.snapshot_id = s.snapshot_id AND e.version = s.version
    )
"""
_RETIRED_WITH_CONTENT = """
    SELECT r.rollout_id, r.snapshot_id, r.version FROM rollouts AS r
    WHERE r.state = 'retired' AND (
        EXISTS (SELECT 1 FROM entries AS e WHERE e.rollout_id = r.rollout_id)
        OR EXISTS (SELECT 1 FROM snapshots AS s WHERE s.rollout_id = r.rollout_id)
    )
"""


def run_reader(part: Round, name: str, counters: mmap, slot: int) -> None:
    """The body of the reader process. In any transaction it must see whole snapshots only."""
    ledger = Ledger(part.plan.ledgers / f"{name}.ledger")
    dice = random.Random(f"{part.plan.seed}/{name}")
    view = memoryview(counters).cast("q")
    parent = os.getppid()
    while os.getppid() == parent:
        started = time.monotonic_ns()
        try:
            for rollout_id, snapshot_id, version in _look(part, dice):
                ledger.write("half", started, rollout_id, snapshot_id=snapshot_id or "", version=version)
            view[slot] += 1
        except sqlite3.Error as error:
            if view[slot]:
                ledger.write("error", started, detail=f"the reader: {error}")
            # Else nobody has finished making the database yet.
            time.sleep(0.01)


def _look(part: Round, dice: random.Random) -> list[tuple[str, str, int]]:
    connection = sqlite3.connect(f"file:{part.plan.database}?mode=ro", uri=True, timeout=30, isolation_level=None)
    try:
        connection.execute("BEGIN")
        found = connection.execute(_HALF_SNAPSHOTS).fetchall()
        time.sleep(LONGEST_SECONDS * dice.random() ** 3)
        # Still the same view of the database, whatever was written meanwhile.
        found += connection.execute(_RETIRED_WITH_CONTENT).fetchall()
        connection.execute("ROLLBACK")
    finally:
        connection.close()
    return found
