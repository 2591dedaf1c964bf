"""The views of a person with only the ``sqlite3`` shell: each answers, and tokens decode exactly."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.frozen import OPEN, entry, frozen
from token_id_capture.store import TokenCaptureStore
from token_id_capture.store.codec import pack
from token_id_capture.store.file.revision import HEAD_REVISION
from token_id_capture.store.schema import ENTRY_COLUMNS

VIEWS = ("call_chain", "call_tokens", "kept_evidence", "late_calls", "lost_calls", "rollout_overview")


@pytest.fixture
def shell(tmp_path: Path) -> sqlite3.Connection:  # type: ignore[misc]
    with contextlib.closing(sqlite3.connect(frozen(HEAD_REVISION, tmp_path), isolation_level=None)) as connection:
        yield connection


def test_the_views_are_these(shell: sqlite3.Connection) -> None:
    names = shell.execute("SELECT name FROM sqlite_master WHERE type = 'view' ORDER BY name").fetchall()
    assert tuple(name for (name,) in names) == VIEWS


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_has_rows_of_a_run_and_no_undefined_column(shell: sqlite3.Connection, view: str) -> None:
    shell.execute("PRAGMA trusted_schema = OFF")
    cursor = shell.execute(f"SELECT * FROM {view}")
    assert len(cursor.fetchall()) > 0
    names = [column[0] for column in cursor.description]
    assert len(names) == len(set(names))
    assert all(name.isidentifier() and not name.startswith("column") for name in names)


def test_the_overview_has_one_row_for_each_rollout(shell: sqlite3.Connection) -> None:
    rows = shell.execute("SELECT rollout_id, state, calls, latest_outcome FROM rollout_overview ORDER BY rollout_id")
    assert rows.fetchall() == [
        ("delivered", "frozen", 1, "delivered"),
        ("masked", "frozen", 2, "masked"),
        ("open", "open", 4, None),
        ("retired", "retired", 1, "delivered"),
    ]


def test_evidence_and_lost_calls_name_their_reasons(shell: sqlite3.Connection) -> None:
    assert shell.execute("SELECT rollout_id, outcome, reason FROM kept_evidence").fetchall() == [
        ("masked", "masked", "multiple_roots")
    ]
    assert shell.execute("SELECT rollout_id, model_call_id FROM lost_calls").fetchall() == [("open", "lost")]


def test_the_tokens_of_each_call_decode_to_what_was_captured(shell: sqlite3.Connection) -> None:
    for call in OPEN:
        rows = shell.execute(
            "SELECT part, position, token_id FROM call_tokens WHERE rollout_id = 'open' AND model_call_id = ? "
            "ORDER BY position",
            (call.model_call_id,),
        ).fetchall()
        whole = [*call.prompt_token_ids, *call.generation_token_ids]
        assert [token for _, _, token in rows] == whole[len(whole) - len(rows) :]
        assert [position for _, position, _ in rows] == list(range(len(whole) - len(rows), len(whole)))
        assert [part for part, _, _ in rows].count("generation") == len(call.generation_token_ids)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 2**32 - 1), max_size=2100), st.lists(st.integers(0, 2**32 - 1), max_size=20))
def test_any_tokens_decode(shell: sqlite3.Connection, prompt: list[int], generation: list[int]) -> None:
    row = pack(entry("drawn", "c0", prompt, generation)).row(0.0, "w")
    shell.execute("DELETE FROM entries WHERE rollout_id = 'drawn'")
    names = ("rollout_id", *ENTRY_COLUMNS)
    shell.execute(
        f"INSERT INTO entries ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})",
        [row[name] for name in names],
    )
    decoded = shell.execute("SELECT token_id FROM call_tokens WHERE rollout_id = 'drawn' ORDER BY position").fetchall()
    assert [token for (token,) in decoded] == prompt + generation


async def test_one_call_is_decoded_without_looking_at_the_others(tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        await store.put(entry("math-0", "c0", [1, 2], [3]))
    with contextlib.closing(sqlite3.connect(store.database)) as connection:
        query = "SELECT token_id FROM call_tokens WHERE rollout_id = 'math-0' AND model_call_id = 'c0'"
        plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {query}")]
    assert not [step for step in plan if step.startswith("SCAN e")], plan
    assert any("sqlite_autoindex_entries_1 (rollout_id=? AND model_call_id=?)" in step for step in plan), plan
