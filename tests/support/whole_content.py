"""A database with every kind of row, and all rows of one, rollout by rollout, to compare it with a copy."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

from support.captured import entry, finish, put_chain
from token_id_capture.errors import StoreError
from token_id_capture.lifecycle import CallOrigin, Purpose
from token_id_capture.provenance import HistoryLink
from token_id_capture.store import TokenCaptureStore
from token_id_capture.store.copying.parts import PARTS


def whole_content(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    """The rows of each table, in the order of their storing within a rollout, without the numbers that a file gives."""
    found = {}
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for part in PARTS:
            columns = ", ".join(name for name in part.columns if name in part.table.columns)
            rows = connection.execute(f"SELECT {columns} FROM {part.table.name}").fetchall()
            found[part.table.name] = sorted(rows, key=lambda row: row[0]) if part.ordered else sorted(rows, key=repr)
    return found


async def everything(store: TokenCaptureStore) -> None:
    """What ``many_rollouts`` lacks: whose call it was, experts, a continued history, versions, remnants."""
    origin = CallOrigin("sub-1", "main", Purpose.COMPACTION, False, {"x-session-id": "é\N{ROCKET}"})
    for call in ("kept", "lost", "refused"):
        await store.begin_attributed_call("math-0", call, origin)
    fields: dict[str, Any] = {
        "agent": "sub-1", "parent_agent": "main", "purpose": "compaction", "offers_tools": True,
        "routed_experts": [[1, 2], [3, 4]], "weight_version": "step-12", "session_headers": {"x": "y"},
        "of_a_later_release": {"nested": [1.5, None]},
    }  # fmt: skip
    await store.put(entry("math-0", "kept", [1, 2], [3], **fields), HistoryLink(b"chain", b"", b"ids", True))
    await store.refuse_call("math-0", "refused", "the engine said\nno")
    await store.mark_incomplete("math-0", "kept", "store_failed: the disk")
    await put_chain(store, "math-1")
    await finish(store, "math-1", "masked", "multiple_roots")
    await store.mark_incomplete("math-1", "c0", "store_failed: noticed late")
    await finish(store, "math-1", "failed", "no_calls")
    with contextlib.suppress(StoreError):
        await store.put(entry("math-1", "late", [1], [2]))
    # Of a deleted rollout its outcomes are left, and its id may be used again.
    await put_chain(store, "math-2")
    await finish(store, "math-2", "masked", "multiple_roots")
    await put_chain(store, "math-3")
    await finish(store, "math-3", "delivered")
    await store.delete(["math-2", "math-3"])
    await put_chain(store, "math-3", turns=1)
