"""``scripts/torture`` for a few seconds; and it must be able to fail."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

TORTURE = Path(__file__).parents[2] / "scripts" / "torture"
sys.path.insert(0, str(TORTURE.parent))

from torturing.check import Findings  # noqa: E402
from torturing.roles_check import check_roles  # noqa: E402


def torture(directory: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, str(TORTURE), "--database", str(directory), "--json", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout)


def until(done: Callable[[dict[str, Any]], bool], directory: Path, *arguments: str) -> tuple[Path, dict[str, Any]]:
    """The report of a run, and its directory. A busy machine may do too little in a few seconds, and gets more."""
    for seconds in ("5", "20", "60"):
        code, report = torture(directory / seconds, "--seconds", seconds, *arguments)
        assert (code, report["violations"]) == (0, [])
        if done(report):
            break
    return directory / seconds, report


def test_processes_that_are_killed_again_and_again_lose_nothing(tmp_path: Path) -> None:
    few = ("--mode", "kills", "--writers", "3", "--coroutines", "100")
    _, report = until(lambda report: report["kills"] >= 4 and report["put"] > 0, tmp_path, *few)
    assert report["kills"] >= 4
    assert report["put"] > 0
    assert (report["lost"], report["torn"]) == (0, 0)


def kills_of_roles(report: dict[str, Any]) -> int:
    return sum(number for name, number in report.items() if name.endswith("_kills"))


@pytest.fixture(scope="module")
def roles(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """What a run of all roles left, and its report."""
    directory, report = until(
        lambda report: report["finished_rollouts"] > 0 and kills_of_roles(report) >= 3,
        tmp_path_factory.mktemp("roles"),
        *("--mode", "roles"),
    )
    return directory / "roles", report


def test_every_role_may_be_killed_and_nothing_is_lost_torn_or_handed_on_twice(
    roles: tuple[Path, dict[str, Any]],
) -> None:
    _, report = roles
    assert report["finished_rollouts"] > 0
    assert kills_of_roles(report) >= 3


def test_a_server_that_is_killed_like_its_writers_loses_nothing(tmp_path: Path) -> None:
    few = ("--mode", "server", "--writers", "2", "--coroutines", "50", "--kills-per-second", "4")
    _, report = until(lambda report: report["kills"] >= 3 and report["put"] > 0, tmp_path, *few)
    assert report["put"] > 0
    assert report["kills"] >= 3
    assert (report["lost"], report["torn"]) == (0, 0)


def test_a_disk_that_fails_and_then_loses_power_keeps_what_was_acknowledged(tmp_path: Path) -> None:
    code, report = torture(tmp_path / "run", "--mode", "disk", "--seconds", "1")
    assert (code, report["violations"]) == (0, [])
    assert report["injected_errors"] > 0
    assert report["losses_of_power"] > 0


def test_what_the_roles_lose_would_be_found(roles: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    left = shutil.copytree(roles[0], tmp_path / "roles")
    with (left / "finished").open("a") as finished:
        finished.write("never-stored\n")
    with (left / "answered").open("a") as answered:
        answered.write("h9.9\n")
    (left / "rows-99.jsonl").write_text(
        json.dumps({"rollout_id": "never-stored", "mask_sample": True, "_ng_token_capture": {"n_calls": 1}}) + "\n"
    )
    findings = Findings()
    check_roles(left, left / "captures.db", findings)
    assert sorted(kind for kind, _ in findings.violations) == ["lost", "torn"]


def test_every_kind_of_damage_would_be_found_and_a_lost_call_is_named(tmp_path: Path) -> None:
    code, report = torture(tmp_path / "run", "--self-test")
    assert (code, report["violations"]) == (0, [])
    with closing(sqlite3.connect(tmp_path / "run" / "token_captures.db", isolation_level=None)) as connection:
        rollout_id, call_id = connection.execute(
            "SELECT rollout_id, model_call_id FROM entries WHERE rollout_id = 'round0-0' ORDER BY rowid DESC"
        ).fetchone()
        connection.execute("DELETE FROM entries WHERE model_call_id = ?", (call_id,))
    code, report = torture(tmp_path / "run", "--check-only")
    assert code == 1
    assert f"lost: {rollout_id}: the entry of call {call_id}" in report["violations"]
    assert report["lost"] == len(report["violations"])


def test_a_directory_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    command = [sys.executable, str(TORTURE), "--database", str(tmp_path), "--seconds", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "name an empty directory" in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
