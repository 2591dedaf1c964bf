"""``tokcap verify``: every kind of damage, made in a real file, is found and named by the real command."""

from __future__ import annotations

import json
import os
import pty
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from support.captured import content, entry, filled, finish, one_line, process, put_chain, sql
from support.commands import TOKCAP, RunTokcap, clean_environment
from token_id_capture.store import TokenCaptureStore


async def some_rollouts(store: TokenCaptureStore) -> None:
    await put_chain(store, "math-0")
    await put_chain(store, "math-1")
    await finish(store, "math-1", "masked", "multiple_roots")
    experts = [[1, 2], [3]] * 100
    await store.put(entry("math-2", "rich", [1, 2], [3], routed_experts=experts, sampling={"top_p": 0.9}, note="kept"))
    await store.put(entry("math-2", "silent", [1, 2], []))
    await store.retire(["math-0-old"])


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return content(filled(tmp_path_factory.mktemp("original") / "captures.db", some_rollouts))


@pytest.fixture
def database(original: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "captures.db"
    path.write_bytes(original)
    return path


def test_what_is_as_it_was_stored_passes(tokcap: RunTokcap, database: Path) -> None:
    before = content(database)
    shown = tokcap("verify", "-d", database)
    assert (shown.returncode, shown.stdout) == (0, "")
    assert one_line(shown.stderr) == ("tokcap: checked 8 calls of 3 rollouts and 3 calls of 1 snapshot: no damage")
    assert content(database) == before


CALL = "WHERE rollout_id = 'math-0' AND model_call_id = 'c1'"
C1 = "call c1 of rollout math-0: "
CONTENT = "its log probabilities or its content do not match the digest stored with them"
TOKENS = "its tokens do not match the digest stored with them"
NEXT_IS_AFFECTED = "call c2 of rollout math-0: its prefix, call c1, is damaged"
NEXT_IS_CUT_OFF = "call c2 of rollout math-0: its prefix, call c1, is missing or has a different length"
SNAPSHOT = "rollout math-1 in snapshot {snapshot} version 1: "


def flip(table: str, blob: str, where: str) -> str:
    return f"UPDATE {table} SET {blob} = CAST(x'ffffffff' || substr({blob}, 5) AS BLOB) {where}"


DAMAGE: dict[str, tuple[list[str], list[str]]] = {
    "sampled ids": ([flip("entries", "generation", CALL)], [C1 + TOKENS, NEXT_IS_AFFECTED]),
    "prompt ids": ([flip("entries", "prompt_suffix", CALL)], [C1 + TOKENS, NEXT_IS_AFFECTED]),
    "log probabilities": ([flip("entries", "log_probs", CALL)], [C1 + CONTENT]),
    "content": ([f"UPDATE entries SET content = replace(content, 'answer', 'ANSWER') {CALL}"], [C1 + CONTENT]),
    "a column": ([f"UPDATE entries SET finish_reason = 'length' {CALL}"], [C1 + CONTENT]),
    "routed experts": (
        ["UPDATE entries SET routed_experts = x'00' WHERE model_call_id = 'rich'"],
        ["call rich of rollout math-2: cannot be read (Error -5 while decompressing data: "
         "incomplete or truncated stream)"],
    ),
    "a pointer": (
        [f"UPDATE entries SET prefix_call_id = 'nobody' {CALL}"],
        [C1 + "its prefix, call nobody, is missing or has a different length", NEXT_IS_AFFECTED],
    ),
    "a call that is gone": ([f"DELETE FROM entries {CALL}"], [NEXT_IS_CUT_OFF]),
    "a newer record": (
        [f"UPDATE entries SET schema_version = 7 {CALL}"],
        [C1 + "is a record of version 7: upgrade token-id-capture to check it", NEXT_IS_CUT_OFF],
    ),
    "a copy": (
        ["DROP TRIGGER snapshot_entries_immutable", flip("snapshot_entries", "generation", "WHERE prefix_length = 13")],
        ["call c2 of " + SNAPSHOT + TOKENS],
    ),
    "a copy that is gone": (
        ["DROP TRIGGER snapshot_entries_evidence", "DELETE FROM snapshot_entries WHERE model_call_id = 'c2'"],
        [SNAPSHOT + "holds 2 calls, and 3 were copied into it"],
    ),
    "a snapshot's outcome": (
        ["DROP TRIGGER snapshots_immutable", "UPDATE snapshots SET incomplete = 1"],
        [SNAPSHOT + "says incomplete = 1, and has 0 flags"],
    ),
    "a rollout": (
        ["UPDATE rollouts SET snapshot_id = 'nothing' WHERE rollout_id = 'math-1'"],
        ["rollout math-1: is frozen, but its snapshot nothing does not exist"],
    ),
    "a reference": (
        ["PRAGMA foreign_keys = OFF", "DELETE FROM rollouts WHERE rollout_id = 'math-2'"],
        [f"row {row} of entries refers to a row of rollouts that does not exist" for row in (7, 8)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("damaged", DAMAGE)
def test_damage_is_named(tokcap: RunTokcap, database: Path, damaged: str) -> None:
    statements, damages = DAMAGE[damaged]
    snapshot = sql(database, "SELECT snapshot_id FROM snapshots")[0][0]
    sql(database, *statements)
    shown = tokcap("verify", "-d", database)
    assert shown.returncode == 1, shown.stderr
    assert shown.stdout.splitlines() == [damage.format(snapshot=snapshot) for damage in damages]
    assert one_line(shown.stderr).endswith(f": {len(damages)} damage{'s' if len(damages) > 1 else ''}")


def test_json_lists_what_is_damaged(tokcap: RunTokcap, database: Path) -> None:
    sql(database, flip("entries", "log_probs", CALL))
    shown = tokcap("verify", "-d", database, "--json")
    assert shown.returncode == 1
    report = json.loads(shown.stdout)
    assert report["damaged"] == 1
    assert (report["damages"][0]["rollout_id"], report["damages"][0]["model_call_id"]) == ("math-0", "c1")
    assert report["checked"] == {"rollouts": 3, "calls": 8, "snapshots": 1, "snapshot_calls": 3}


def test_a_page_that_is_overwritten_damages_the_calls_on_it_and_the_others_are_still_checked(
    tokcap: RunTokcap, tmp_path: Path
) -> None:
    async def many(store: TokenCaptureStore) -> None:
        for number in range(20):
            await put_chain(store, f"math-{number:02}", width=300)

    database = filled(tmp_path / "captures.db", many)
    damaged = bytearray(content(database))
    start = damaged.index(b"answer of c1 in math-07") // 4096 * 4096
    damaged[start : start + 4096] = os.urandom(4096)
    database.write_bytes(damaged)
    shown = tokcap("verify", "-d", database)
    assert shown.returncode == 1
    lines = shown.stdout.splitlines()
    assert lines[0].startswith("the structure of the file is damaged: ")
    named = {line.partition("rollout ")[2][:7] for line in lines if "rollout math-" in line}
    assert "math-07" in named
    assert not named & {"math-00", "math-19"}
    assert "checked " in shown.stderr


def test_a_file_that_cannot_be_read_is_code_2(tokcap: RunTokcap, tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("no database at all\n" * 1000)
    for name in ("missing.db", "text.db"):
        refused = tokcap("verify", "-d", tmp_path / name)
        assert (refused.returncode, refused.stdout) == (2, "")
        one_line(refused.stderr)


WRITES_RETIRES_AND_GOES_ON = """
async def churn():
    number = 0
    while True:
        number += 1
        await put_chain(store, f"churn-{number}")
        await store.retire([f"churn-{number - 5}"])
        if number == 10:
            ready()
await churn()
"""


def test_verifying_while_others_write_and_retire_finds_no_damage(tokcap: RunTokcap, tmp_path: Path) -> None:
    database = tmp_path / "captures.db"
    with process(database, WRITES_RETIRES_AND_GOES_ON) as writer:
        for _ in range(3):
            shown = tokcap("verify", "-d", database)
            assert (shown.returncode, shown.stdout) == (0, ""), shown.stderr
        assert writer.poll() is None


def test_results_reach_a_file_also_while_a_bar_is_on_the_terminal(database: Path, tmp_path: Path) -> None:
    sql(database, flip("entries", "log_probs", CALL))
    controller, terminal = pty.openpty()
    with open(tmp_path / "damages", "wb") as results:
        run = subprocess.Popen(
            [TOKCAP, "verify", "-d", str(database)], stdout=results, stderr=terminal, env=clean_environment()
        )
    os.close(terminal)
    shown = b"".join(iter(lambda: read_terminal(controller), b""))
    os.close(controller)
    assert run.wait(60) == 1
    assert (tmp_path / "damages").read_text().splitlines() == [C1 + CONTENT]
    assert b"calls" in shown
    assert b"1 damage" in shown


def read_terminal(controller: int) -> bytes:
    """What comes next; empty once every process has closed the other end."""
    try:
        return os.read(controller, 4096)
    except OSError:
        return b""


def test_a_row_that_an_index_lacks_is_damage(tokcap: RunTokcap, database: Path) -> None:
    index = "name = 'incomplete_flags_by_rollout'"
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("PRAGMA writable_schema = ON")
        row = connection.execute(f"SELECT * FROM sqlite_master WHERE {index}").fetchone()
        connection.execute(f"DELETE FROM sqlite_master WHERE {index}")
    with closing(sqlite3.connect(database)) as connection, connection:
        columns = "rollout_id, model_call_id, reason, detail, flagged_at"
        connection.execute(f"INSERT INTO incomplete_flags ({columns}) VALUES ('math-0', 'c1', 'lost', '', 1.0)")
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("INSERT INTO sqlite_master VALUES (?, ?, ?, ?, ?)", row)
    shown = tokcap("verify", "-d", database)
    assert shown.returncode == 1
    assert "missing from index incomplete_flags_by_rollout" in shown.stdout
