"""``tokcap copy``: what it says, its exit codes, and that an interrupted one is completed."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from pathlib import Path

import pytest

from support.captured import filled, finish, mode_of, one_line, put_chain, sql
from support.commands import TOKCAP, RunTokcap, clean_environment
from support.many_rollouts import database_with
from support.whole_content import whole_content
from token_id_capture.store import TokenCaptureStore


async def some_rollouts(store: TokenCaptureStore) -> None:
    await put_chain(store, "math-0")
    await put_chain(store, "math-1")
    await finish(store, "math-1", "masked", "multiple_roots")


def test_what_is_copied_and_what_is_left_out_is_said(tokcap: RunTokcap, tmp_path: Path) -> None:
    here, there = filled(tmp_path / "here.db", some_rollouts), tmp_path / "there.db"
    first = tokcap("copy", here, there)
    assert (first.returncode, first.stdout) == (1, "")
    done, left_out = first.stderr.splitlines()
    assert done == "tokcap: copied 1 rollout of 3 calls"
    assert "1 not frozen" in left_out
    assert left_out.endswith(": math-0")
    assert mode_of(there) == 0o600
    second = tokcap("copy", here, there, "--include-open")
    assert second.returncode == 0
    assert one_line(second.stderr) == "tokcap: copied 1 rollout of 3 calls, 1 already there"
    sql(there, "UPDATE rollouts SET version = 9 WHERE rollout_id = 'math-0'")
    third = tokcap("copy", here, there, "math-0", "math-1", "nobody", "--json", "--include-open")
    assert third.returncode == 1
    assert json.loads(third.stdout) == {
        "copied": 0, "calls": 0, "already_there": 1, "conflicts": ["math-0"], "open_rollouts": [],
        "absent": ["nobody"], "damaged": [],
    }  # fmt: skip
    assert sql(there, "SELECT version FROM rollouts WHERE rollout_id = 'math-0'") == [(9,)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.db", "there.db"), "there is no capture database at"),
        (("here.db", "here.db"), "is the source itself: name another database"),
        (("here.db", "other.db"), "SQLite database of another program"),
        (("here.db", "there.db", "../x"), "invalid rollout id '../x'"),
        (("here.db", "mysql://host/x"), "cannot use mysql://"),
    ],
)
def test_a_refusal_is_one_line_and_changes_nothing(
    arguments: tuple[str, ...], message: str, tokcap: RunTokcap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    filled(tmp_path / "here.db", some_rollouts)
    sql(tmp_path / "other.db", "CREATE TABLE precious (x)")
    refused = tokcap("copy", *arguments)
    assert refused.returncode == 2
    assert message in one_line(refused.stderr)
    assert not (tmp_path / "there.db").exists()


def test_an_interrupted_copy_says_how_far_it_came_and_is_completed(
    tokcap: RunTokcap, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    here, there = database_with(400, tmp_path_factory), tmp_path / "there.db"
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [TOKCAP, "copy", here, there, "--include-open"], stderr=theirs, env={**clean_environment(), "COLUMNS": "200"}
    ) as copying:
        os.close(theirs)
        shown = b""
        while b"copy" not in shown:  # the bar, which a terminal shows
            shown += os.read(ours, 4096)
        copying.send_signal(signal.SIGINT)
        while copying.poll() is None or b"interrupted" not in shown:
            try:
                shown += os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
    os.close(ours)
    assert copying.wait(60) == 130
    assert b"the same command copies the rest" in shown
    assert tokcap("copy", here, there, "--include-open").returncode == 0
    assert whole_content(there) == whole_content(here)
