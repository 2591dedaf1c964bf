"""What the reader process does: it holds read transactions open, and looks around inside them."""

from __future__ import annotations

import os
import random
import sqlite3
import time
from contextlib import closing
from mmap import mmap
from typing import Any

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
        except Exception as error:
            # A server may be gone at any moment. Of a file, nobody may have finished making the database yet.
            if view[slot] and not part.plan.url:
                ledger.write("error", started, detail=f"the reader: {error}")
            time.sleep(0.01)


def _look(part: Round, dice: random.Random) -> list[tuple[str, str, int]]:
    with closing(_connect(part)) as connection:
        found: list[tuple[str, str, int]] = connection.execute(_HALF_SNAPSHOTS).fetchall()
        time.sleep(LONGEST_SECONDS * dice.random() ** 3)
        # Still the same view of the database, whatever was written meanwhile.
        found += connection.execute(_RETIRED_WITH_CONTENT).fetchall()
        connection.execute("ROLLBACK")
    return found


def _connect(part: Round) -> Any:
    """A connection whose transaction has begun."""
    if part.plan.url:
        import psycopg

        server = psycopg.connect(part.plan.url, autocommit=True)
        server.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        return server
    connection = sqlite3.connect(f"file:{part.plan.database}?mode=ro", uri=True, timeout=30, isolation_level=None)
    connection.execute("BEGIN")
    return connection
