"""All rows of a database, rollout by rollout, to compare it with a copy."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

from token_id_capture.store.copying.parts import PARTS


def whole_content(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    """The rows of each table, in the order of their storing within a rollout, without the numbers that a file gives."""
    found = {}
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for part in PARTS:
            columns = ", ".join((part.key, *part.columns))
            rows = connection.execute(f"SELECT {columns} FROM {part.table.name}").fetchall()
            found[part.table.name] = sorted(rows, key=lambda row: row[0]) if part.ordered else sorted(rows, key=repr)
    return found
