"""``tokcap finalize --output -``: rows go to a pipe, and nothing is retired or called delivered."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from support.captured import filled, one_line, put_chain, sql
from support.commands import TOKCAP, RunTokcap, clean_environment
from token_id_capture.store import TokenCaptureStore

RECORDS = "".join(json.dumps({"_ng_rollout_id": f"r{number}", "reward": 1.0}) + "\n" for number in range(3))


async def three(store: TokenCaptureStore) -> None:
    for number in range(3):
        await put_chain(store, f"r{number}")


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return filled(tmp_path / "captures.db", three)


def test_rows_go_to_standard_output_and_captures_stay(
    tokcap: RunTokcap, database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = tokcap("finalize", "-", "-d", database, "-o", "-", "--format", "trajectory", stdin=RECORDS)
    assert done.returncode == 0, done.stderr
    assert [json.loads(row)["rollout_id"] for row in done.stdout.splitlines()] == ["r0", "r1", "r2"]
    assert not (tmp_path / "-").exists()
    assert sql(database, "SELECT DISTINCT state FROM rollouts") == [("frozen",)]
    assert sql(database, "SELECT count(*) FROM build_outcomes WHERE outcome = 'delivered'") == [(0,)]
    again = tokcap(
        "finalize",
        "-",
        "-d",
        database,
        "-o",
        tmp_path / "rows.jsonl",
        "--retire",
        "--format",
        "trajectory",
        stdin=RECORDS,
    )
    assert (again.returncode, (tmp_path / "rows.jsonl").read_text()) == (0, done.stdout)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-o", "-", "--retire"], "--retire needs durable rows"),
        (["-o", "-", "--json"], "rows and --json cannot both go to standard output"),
        (["-o", "memory://rows.jsonl", "--retire"], "--retire needs each row to be durable on its own"),
        (["-o", "-", "--shard-rows", "2"], "standard output is one stream"),
    ],
)
def test_what_would_not_be_durable_or_not_be_rows_is_refused_before_anything_is_frozen(
    tokcap: RunTokcap, database: Path, options: list[str], said: str
) -> None:
    refused = tokcap("finalize", "-", "-d", database, *options, stdin=RECORDS)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert said in one_line(refused.stderr)
    assert sql(database, "SELECT DISTINCT state FROM rollouts") == [("open",)]


def test_a_reader_that_has_left_ends_the_run_without_a_traceback(database: Path, tmp_path: Path) -> None:
    (tmp_path / "rollouts.jsonl").write_text(RECORDS)
    read, write = os.pipe()
    os.close(read)
    try:
        command = [str(TOKCAP), "finalize", str(tmp_path / "rollouts.jsonl"), "-d", str(database), "-o", "-"]
        left = subprocess.run(
            command, stdout=write, stderr=subprocess.PIPE, env=clean_environment(), timeout=60, check=False
        )
    finally:
        os.close(write)
    assert (left.returncode, left.stderr) == (1, b"")
