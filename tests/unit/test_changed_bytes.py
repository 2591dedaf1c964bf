"""A byte of the file changes, of which SQLite knows nothing: no consumer is given what was not captured."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from token_id_capture.errors import CorruptCaptureError
from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore
from token_id_capture.store.file.read_only import read_only
from token_id_capture.store.read.evidence import read_evidence

CHANGES = {
    "log_probs": "CAST(x'01' || substr(log_probs, 2) AS BLOB)",
    "generation": "CAST(x'01' || substr(generation, 2) AS BLOB)",
    "prompt_suffix": "CAST(x'05' || substr(prompt_suffix, 2) AS BLOB)",
    "content": "replace(content, 'said', 'sent')",
    "extras": """'{"weight_version":"9"}'""",
    "finish_reason": "'abort'",
    "model": "'another'",
    "created_at": "created_at + 1",
    "routed_experts": "CAST(x'00' || substr(routed_experts, 2) AS BLOB)",
    "payload_digest": "CAST(x'00' || substr(payload_digest, 2) AS BLOB)",
}


def entry(call: str, prompt: list[int]) -> TokenEntry:
    return TokenEntry(
        rollout_id="r",
        model_call_id=call,
        model="policy",
        prompt_token_ids=prompt,
        generation_token_ids=[7, 8],
        generation_log_probs=[-0.25, -0.5],
        output_items=[{"type": "message", "content": "it said so"}],
        routed_experts=[[1, 2]],
        finish_reason="stop",
    )


@pytest.fixture
async def frozen(tmp_path: Path) -> Path:
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        await store.put(entry("a", [1, 2]))
        await store.put(entry("b", [1, 2, 7, 8, 3]))
        await store.mark_incomplete("r", reason="lost_stream")
        await store.freeze("r")
    return store.database


def change(path: Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for (trigger,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            connection.execute(f"DROP TRIGGER {trigger}")
        assert connection.execute(statement).rowcount == 1


async def assert_refused(path: Path, match: str) -> None:
    async with TokenCaptureStore(path) as store:
        with pytest.raises(CorruptCaptureError, match=match):
            await store.freeze("r")
    with read_only(path) as connection, pytest.raises(CorruptCaptureError, match=match):
        read_evidence(connection, "r")


@pytest.mark.parametrize("column", CHANGES)
async def test_a_call_of_a_snapshot_that_is_not_what_was_captured_is_refused(column: str, frozen: Path) -> None:
    change(frozen, f"UPDATE snapshot_entries SET {column} = {CHANGES[column]} WHERE model_call_id = 'b'")
    await assert_refused(frozen, "call 'b' of rollout 'r' is damaged")


@pytest.mark.parametrize("column", CHANGES)
async def test_a_stored_call_that_is_not_what_was_captured_is_refused(column: str, frozen: Path) -> None:
    change(frozen, f"UPDATE entries SET {column} = {CHANGES[column]} WHERE model_call_id = 'a'")
    async with TokenCaptureStore(frozen) as store:
        with pytest.raises(CorruptCaptureError, match="call 'a' of rollout 'r' is damaged"):
            await store.read_entries("r")


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM snapshot_entries WHERE model_call_id = 'b'",
        "DELETE FROM snapshot_flags",
        "UPDATE snapshots SET incomplete = 0",
        "UPDATE snapshots SET entry_count = 3",
    ],
)
async def test_a_snapshot_that_does_not_hold_what_was_copied_into_it_is_refused(statement: str, frozen: Path) -> None:
    change(frozen, statement)
    await assert_refused(frozen, "version 2 of the snapshot of rollout 'r' is damaged")
