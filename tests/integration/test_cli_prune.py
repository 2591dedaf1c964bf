"""``tokcap prune``: what is old goes, what is needed stays, and nobody is surprised."""

from __future__ import annotations

import asyncio
import os
import pty
import subprocess
from pathlib import Path

import pytest

from support.captured import (
    entry,
    filled,
    finish,
    one_line,
    process,
    put_chain,
    sql,
)
from support.commands import TOKCAP, RunTokcap, clean_environment
from token_id_capture.errors import RolloutRetiredError
from token_id_capture.store import TokenCaptureStore

DAYS = 86_400


async def a_long_run(store: TokenCaptureStore) -> None:
    for name in ("handed-on-0", "handed-on-1", "masked", "failed", "undecided", "open"):
        await put_chain(store, name)
    for name in ("handed-on-0", "handed-on-1"):
        snapshot = await store.freeze(name)
        await store.record_outcome(snapshot.snapshot_id, snapshot.version, "delivered")
        assert await store.drop(name, snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        with pytest.raises(RolloutRetiredError):
            await store.put(entry(name, "late", [1], [2]))
    await finish(store, "masked", "masked", "multiple_roots")
    await finish(store, "failed", "failed", "build_failed")
    await store.freeze("undecided")


def aged(database: Path, days: float, *, but: str = "") -> Path:
    """Move everything into the past, but for one rollout."""
    seconds = days * DAYS
    other = f"WHERE rollout_id <> '{but}'"
    sql(
        database,
        "DROP TRIGGER build_outcomes_append_only",
        f"UPDATE build_outcomes SET recorded_at = recorded_at - {seconds} {other}",
        f"UPDATE rollouts SET opened_at = opened_at - {seconds}, retired_at = retired_at - {seconds} {other}",
        f"UPDATE late_writes SET attempted_at = attempted_at - {seconds} {other}",
        f"UPDATE writers SET started_at = started_at - {seconds}, last_seen_at = last_seen_at - {seconds}",
    )
    return database


def ids(database: Path, table: str = "rollouts") -> list[str]:
    return [row[0] for row in sql(database, f"SELECT DISTINCT rollout_id FROM {table} ORDER BY rollout_id")]


ALL = ["failed", "handed-on-0", "handed-on-1", "masked", "open", "undecided"]
KEPT = ["failed", "masked", "open", "undecided"]


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return aged(filled(tmp_path_factory.mktemp("run") / "captures.db", a_long_run), 15).read_bytes()


@pytest.fixture
def database(long_run: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "captures.db"
    path.write_bytes(long_run)
    return path


def table(text: str) -> dict[str, list[str]]:
    """Counts and reasons by the first two words of each line."""
    lines = [line.split("  ") for line in text.splitlines()[1:]]
    return {line[0]: [cell.strip() for cell in line[1:] if cell.strip()] for line in lines}


def test_old_tombstones_and_their_trail_go_and_everything_else_stays(tokcap: RunTokcap, database: Path) -> None:
    done = tokcap("prune", "-d", database, "--yes")
    assert done.returncode == 0, done.stderr
    assert table(done.stdout) == {
        "tombstones of retired rollouts": ["2", "-"],
        "outcomes of rollouts that are gone": ["2", "-"],
        "late writes to rollouts that are gone": ["2", "-"],
        "processes that no row refers to": ["0", "-"],
        "masked and failed rollouts (kept without --evidence)": ["2", "build_failed 1, multiple_roots 1"],
    }
    assert one_line(done.stderr) == (
        "tokcap: removed 2 tombstones, 2 outcomes, 0 late writes, 0 processes and 0 rollouts of evidence"
    )
    assert ids(database) == ids(database, "entries") == KEPT
    assert ids(database, "late_writes") == []
    assert ids(database, "build_outcomes") == ["failed", "masked"]
    assert tokcap("verify", "-d", database).returncode == 0
    again = tokcap("prune", "-d", database, "--yes")
    assert (again.returncode, one_line(again.stderr)) == (0, "tokcap: nothing is older than 14d")


def test_what_is_younger_than_the_limit_stays(tokcap: RunTokcap, database: Path) -> None:
    kept = tokcap("prune", "-d", database, "--older-than", "16d", "--evidence", "--yes")
    assert (kept.returncode, one_line(kept.stderr)) == (0, "tokcap: nothing is older than 16d")
    assert ids(database) == ALL


def test_evidence_goes_only_when_asked_for_and_leaves_its_trail(tokcap: RunTokcap, database: Path) -> None:
    done = tokcap("prune", "-d", database, "--older-than", "360h", "--evidence", "--yes")
    assert done.returncode == 0, done.stderr
    assert "2 rollouts of evidence; tokcap vacuum" in one_line(done.stderr)
    assert ids(database, "entries") == ["open", "undecided"]
    trail = "SELECT rollout_id, outcome, reason FROM build_outcomes ORDER BY rollout_id, outcome_id"
    assert sql(database, trail) == [
        ("failed", "failed", "build_failed"),
        ("failed", "released", "pruned: older than 360h"),
        ("masked", "masked", "multiple_roots"),
        ("masked", "released", "pruned: older than 360h"),
    ]
    assert sql(database, "SELECT rollout_id FROM rollouts WHERE state = 'retired' ORDER BY rollout_id") == [
        ("failed",),
        ("masked",),
    ]

    async def write_late() -> None:
        async with TokenCaptureStore(database) as store:
            with pytest.raises(RolloutRetiredError):
                await store.put(entry("masked", "late", [1], [2]))

    asyncio.run(write_late())


def test_young_evidence_stays_when_old_evidence_goes(tokcap: RunTokcap, tmp_path: Path) -> None:
    database = aged(filled(tmp_path / "captures.db", a_long_run), 15, but="masked")
    done = tokcap("prune", "-d", database, "--evidence", "--yes")
    assert done.returncode == 0, done.stderr
    assert ids(database, "snapshots") == ["masked", "undecided"]


def test_evidence_that_was_marked_for_a_new_outcome_is_kept(tokcap: RunTokcap, database: Path) -> None:
    async def deliver_after_all() -> None:
        async with TokenCaptureStore(database) as store:
            await finish(store, "masked", "delivered")

    asyncio.run(deliver_after_all())
    assert tokcap("prune", "-d", database, "--evidence", "--yes").returncode == 0
    assert ids(database, "snapshots") == ["masked", "undecided"]


def test_a_dry_run_changes_nothing(tokcap: RunTokcap, database: Path) -> None:
    before = database.read_bytes()
    shown = tokcap("prune", "-d", database, "--evidence", "--dry-run")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert table(shown.stdout)["tombstones of retired rollouts"] == ["2", "-"]
    assert database.read_bytes() == before


def test_without_a_terminal_it_asks_for_yes(tokcap: RunTokcap, database: Path) -> None:
    refused = tokcap("prune", "-d", database, stdin="y\n")
    assert refused.returncode == 2
    assert "use --yes" in one_line(refused.stderr)
    assert ids(database) == ALL


@pytest.mark.parametrize(("answer", "left", "code"), [(b"y\n", KEPT, 0), (b"\n", ALL, 1)])
def test_on_a_terminal_it_asks(database: Path, answer: bytes, left: list[str], code: int) -> None:
    controller, terminal = pty.openpty()
    try:
        run = subprocess.Popen(
            [TOKCAP, "prune", "-d", str(database)], stdin=terminal, env=clean_environment(),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        os.write(controller, answer)
        shown, asked = run.communicate(timeout=60)
    finally:
        os.close(controller)
        os.close(terminal)
    assert run.returncode == code, asked
    assert b"tombstones" in shown
    assert b"Remove these?" in asked
    assert ids(database) == left


@pytest.mark.parametrize("age", ["14", "two days", "-1d", "1d12h", ""])
def test_an_age_that_is_none_is_one_line(tokcap: RunTokcap, database: Path, age: str) -> None:
    refused = tokcap("prune", "-d", database, f"--older-than={age}", "--yes")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "is not a duration" in one_line(refused.stderr)


def test_only_processes_that_are_gone_and_that_nothing_names_are_forgotten(tokcap: RunTokcap, tmp_path: Path) -> None:
    database = tmp_path / "captures.db"
    filled(database, lambda store: put_chain(store, "stored"))
    filled(database, lambda store: store.begin_call("lost", "c0"))
    filled(database, lambda store: store.mark_incomplete("flagged"))
    filled(database, lambda store: store.mark_incomplete("alive"))
    stored, lost, _, alive = [row[0] for row in sql(database, "SELECT writer_id FROM writers ORDER BY rowid")]
    # This process wrote all four; the first three are made to look as if an earlier boot had seen them.
    sql(
        database,
        f"UPDATE writers SET last_seen_at = last_seen_at - {20 * DAYS}",
        f"UPDATE writers SET boot_id = 'an earlier boot' WHERE writer_id <> '{alive}'",
    )
    done = tokcap("prune", "-d", database, "--yes")
    assert done.returncode == 0, done.stderr
    assert "1 process and" in one_line(done.stderr)
    assert {row[0] for row in sql(database, "SELECT writer_id FROM writers")} == {stored, lost, alive}
    assert sql(database, "PRAGMA foreign_key_check") == []


def test_prune_takes_turns_with_a_process_that_writes(tokcap: RunTokcap, database: Path) -> None:
    writes = "for n in range(10**6):\n    await store.put(entry('running', f'c{n}', [n], [n]))\n    n or ready()"
    with process(database, writes) as writer:
        assert tokcap("prune", "-d", database, "--evidence", "--yes").returncode == 0
        assert writer.poll() is None
    assert ids(database, "entries") == ["open", "running", "undecided"]
    assert tokcap("verify", "-d", database).returncode == 0
