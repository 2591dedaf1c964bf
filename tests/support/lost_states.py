"""Whether puts that were acknowledged are still there after a loss of power; see ``outages`` for the life before it."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from pathlib import Path

from support.interposer import Operation
from support.power import Disk
from support.programs import entry

SHARES = (0.0, 0.5)
"""Of what was not synced, these shares came to the disk."""


def lost_states(operations: list[Operation], directory: Path, *, instants: int, seed: int = 17) -> list[str]:
    """What is wrong with what the disk may hold, at many instants of a life and in several ways each."""
    dice = random.Random(seed)
    chosen = set(dice.sample(range(len(operations)), min(instants, len(operations)))) | {len(operations) - 1}
    disk, stored, problems = Disk(), set[str](), list[str]()
    for number, operation in enumerate(operations):
        disk.apply(operation)
        words = operation.data.decode().split() if operation.kind == "acknowledge" else []
        if words[:1] == ["put"]:
            stored.add(words[1])
        for share in SHARES if number in chosen else ():
            left = directory / f"{number}-{share}"
            left.mkdir()
            disk.lose_power(left, share, dice)
            if problem := _problem(left / "captures.db", stored):
                problems.append(f"at {number} with {share}: {problem}")
    return problems


def _problem(database: Path, stored: set[str]) -> str:
    if not stored:
        return ""
    try:
        with closing(sqlite3.connect(database)) as connection:
            sound = connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            rows = connection.execute("SELECT model_call_id, generation, log_probs FROM entries").fetchall()
    except sqlite3.Error as error:
        return str(error)
    whole = {call for call, *blobs in rows if _is_whole(call, *blobs)}
    missing = sorted(stored - whole)
    return "" if sound and not missing else f"sound: {sound}, missing: {missing[:3]}"


def _is_whole(call: str, generation: bytes, log_probs: bytes) -> bool:
    whole = entry("first", call, len(generation) // 4)
    return (generation, log_probs) == (whole.generation_token_ids.tobytes(), whole.generation_log_probs.tobytes())
