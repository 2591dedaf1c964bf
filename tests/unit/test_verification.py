"""Whatever is stored passes, and whatever byte of it changes is found: drawn at random."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore
from token_id_capture.store.codec import pack, stored_payload_digest
from token_id_capture.store.maintain.verification import Checked, Damage, verify

ids = st.lists(st.integers(0, 2**32 - 1), max_size=6)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def entries(draw: st.DrawFn) -> TokenEntry:
    generation = draw(ids)
    return TokenEntry(
        rollout_id="math-0",
        model_call_id="c0",
        model=draw(st.text(max_size=4)),
        prompt_token_ids=draw(ids),
        generation_token_ids=generation,
        generation_log_probs=[draw(st.floats(allow_nan=False, allow_infinity=False)) for _ in generation],
        routed_experts=draw(json_values),
        output_items=[{"content": draw(json_values)}],
        created_at=draw(st.floats(allow_nan=False, allow_infinity=False)),
        finish_reason=draw(st.none() | st.text(max_size=3)),
        surprise=draw(json_values),
    )


def through_sqlite(row: dict[str, Any]) -> dict[str, Any]:
    """The row as a STRICT table gives it back."""
    types = {str: "TEXT", bytes: "BLOB", int: "INTEGER", float: "REAL", type(None): "TEXT"}
    columns = ", ".join(f"{name} {types[type(value)]}" for name, value in row.items())
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.row_factory = sqlite3.Row
        connection.execute(f"CREATE TABLE stored ({columns}) STRICT")
        connection.execute(f"INSERT INTO stored VALUES ({', '.join('?' * len(row))})", tuple(row.values()))
        return dict(connection.execute("SELECT * FROM stored").fetchone())


@given(entries())
def test_the_payload_digest_can_be_computed_from_what_is_stored(entry: TokenEntry) -> None:
    row = pack(entry).row(0.0, "w")
    assert stored_payload_digest(through_sqlite(row)) == row["payload_digest"]


def test_a_negative_zero_is_stored_as_sqlite_gives_it_back() -> None:
    entry = TokenEntry(
        rollout_id="math-0", model_call_id="c0", prompt_token_ids=[1], generation_token_ids=[2],
        generation_log_probs=[-0.0], created_at=-0.0,
    )  # fmt: skip
    row = pack(entry).row(0.0, "w")
    assert math.copysign(1, row["created_at"]) == 1
    assert stored_payload_digest(through_sqlite(row)) == row["payload_digest"]


async def store_a_branching_rollout(path: Path) -> None:
    def call(name: str, prompt: list[int], generation: list[int]) -> TokenEntry:
        return TokenEntry(
            rollout_id="math-0", model_call_id=name, prompt_token_ids=prompt, generation_token_ids=generation,
            generation_log_probs=[-0.5] * len(generation),
        )  # fmt: skip

    async with TokenCaptureStore(path) as store:
        await store.put(call("root", [1, 2, 3], [4, 5]))
        await store.put(call("left", [1, 2, 3, 4, 5, 6], [7]))
        await store.put(call("right", [1, 2, 3, 4, 5, 9], [8]))
        await store.put(call("leaf", [1, 2, 3, 4, 5, 6, 7], [10]))


def damages_of(path: Path) -> list[Damage]:
    return list(verify(path, Checked()))


AFFECTED = {"root": {"left", "right", "leaf"}, "left": {"leaf"}, "right": set[str](), "leaf": set[str]()}
BLOBS = ("prompt_suffix", "generation", "log_probs", "sequence_digest", "payload_digest")


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(AFFECTED)), st.sampled_from(BLOBS), st.integers(0, 10**6), st.integers(1, 255))
def test_any_flipped_byte_is_found_and_blamed_on_its_call(call: str, blob: str, at: int, flip: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "captures.db"
        path.write_bytes(_branching())
        with contextlib.closing(sqlite3.connect(path)) as connection, connection:
            where = "WHERE model_call_id = ?"
            value = bytearray(connection.execute(f"SELECT {blob} FROM entries {where}", (call,)).fetchone()[0])
            if not value:
                return
            value[at % len(value)] ^= flip
            connection.execute(f"UPDATE entries SET {blob} = ? {where}", (bytes(value), call))
        found = {damage.model_call_id: damage.what for damage in damages_of(path)}
        assert call in found
        tokens = blob in ("prompt_suffix", "generation")
        assert set(found) == ({call} | AFFECTED[call] if tokens else {call})
        assert all("is damaged" in found[name] for name in set(found) - {call})


_made: list[bytes] = []


def _branching() -> bytes:
    """The bytes of one database, made once."""
    if not _made:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "captures.db"
            asyncio.run(store_a_branching_rollout(path))
            assert damages_of(path) == []
            _made.append(path.read_bytes())
    return _made[0]


async def test_damages_come_one_by_one_while_no_transaction_is_open(tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        for number in range(3):
            await store.put(
                TokenEntry(
                    rollout_id=f"math-{number}", model_call_id="c0", prompt_token_ids=[1], generation_token_ids=[2],
                    generation_log_probs=[-0.5],
                )
            )  # fmt: skip
        await store.open()
    with contextlib.closing(sqlite3.connect(store.database)) as connection, connection:
        connection.execute("UPDATE entries SET finish_reason = 'changed'")
    found = verify(store.database, Checked())
    assert next(found).rollout_id == "math-0"
    with contextlib.closing(sqlite3.connect(store.database, isolation_level=None)) as writer:
        writer.execute("UPDATE entries SET finish_reason = NULL WHERE rollout_id = 'math-1'")
        # A reader's open transaction would make this checkpoint come back busy.
        assert writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
    assert [damage.rollout_id for damage in found] == ["math-2"]
