"""``tokcap demo``: real processes, a real kill, and checks that notice what is wrong."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from token_id_capture.cli.demo import run as demo_run
from token_id_capture.cli.demo.checks import CheckedRollout, check
from token_id_capture.cli.demo.journey import Rollout
from token_id_capture.cli.demo.stories import POLICY_SEED, STORIES
from token_id_capture.cli.demo.summary import Report
from token_id_capture.cli.main import app
from token_id_capture.testing.policy import Policy

DEMO = [sys.executable, "-m", "token_id_capture", "demo"]
MASKED = {"lost-call": "capture_incomplete"}


class Finished(NamedTuple):
    """A demo that ran to its end."""

    directory: Path
    report: dict[str, Any]
    stderr: str

    @property
    def lines(self) -> list[bytes]:
        return (self.directory / "train.jsonl").read_bytes().splitlines()

    @property
    def rollouts(self) -> list[Rollout]:
        """The rollouts as their harness saw them."""
        outcomes = {outcome["rollout_id"]: outcome for outcome in self.report["rollouts"]}
        return [
            Rollout(
                story,
                calls=outcomes[story.rollout_id]["calls"],
                kept_tokens=outcomes[story.rollout_id]["delivered_tokens"],
                killed_pid=next((call["pid"] for call in outcomes[story.rollout_id]["lost_calls"]), None),
            )
            for story in STORIES
        ]

    async def check(self, lines: list[bytes], rollouts: list[Rollout] | None = None) -> list[CheckedRollout]:
        return await check(rollouts or self.rollouts, self.directory / "token_captures.db", lines, Policy(POLICY_SEED))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    directory = tmp_path_factory.mktemp("demo") / "new"
    # Settings of a gateway that somebody runs here must not reach the demo's own.
    environment = {**os.environ, "TOKCAP_ENGINE": "message", "TOKCAP_BODY_LIMIT": "1"}
    process = subprocess.run(
        [*DEMO, "--directory", str(directory), "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    assert process.returncode == 0, process.stderr
    return Finished(directory, json.loads(process.stdout), process.stderr)


def processes_of(directory: Path) -> list[str]:
    """The command lines of all processes that work in ``directory``."""
    listed = subprocess.run(["ps", "-e", "-o", "args="], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if str(directory) in line]


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def test_the_demo_delivers_six_rollouts_and_masks_two_with_their_reasons(finished: Finished) -> None:
    report = finished.report
    assert (report["ok"], report["problems"]) == (True, [])
    assert (report["delivered"], report["masked"]) == (7, 1)
    assert {one["rollout_id"]: one["reason"] for one in report["rollouts"] if one["outcome"] == "masked"} == MASKED
    assert report["largest_difference"] == 0.0
    assert report["delivered_tokens"] > 100


def test_the_lost_call_is_named_with_the_process_that_was_killed(finished: Finished) -> None:
    (lost,) = [one for one in finished.report["rollouts"] if one["lost_calls"]]
    assert lost["rollout_id"] == "lost-call"
    (call,) = lost["lost_calls"]
    with pytest.raises(ProcessLookupError):
        os.kill(call["pid"], 0)
    shown = CliRunner().invoke(
        app, ["show", "lost-call", "--database", str(finished.directory)], env={"COLUMNS": "400"}
    )
    assert call["model_call_id"] in shown.stdout
    assert "still open" in shown.stdout


def test_nothing_is_said_beside_the_report(finished: Finished) -> None:
    assert finished.stderr == ""


def test_no_process_is_left(finished: Finished) -> None:
    assert processes_of(finished.directory) == []


def printed(finished: Finished, capsys: pytest.CaptureFixture[str]) -> str:
    database = finished.directory / "token_captures.db"
    outcomes = [CheckedRollout(**outcome) for outcome in finished.report["rollouts"]]
    files = {name: finished.directory / f"{name}.jsonl" for name in ("rollouts", "train")}
    Report(finished.directory, True, 1.0, outcomes, files["rollouts"], files["train"], database).print()
    return capsys.readouterr().out


def test_the_report_names_the_files_and_commands_that_work(
    finished: Finished, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in a checkout whose environment is not active: what is printed can be pasted all the same.
    monkeypatch.setenv("PATH", "/nowhere")
    text = printed(finished, capsys)
    assert "7 rollouts delivered, 1 masked" in text
    for name in ("token_captures.db", "rollouts.jsonl", "train.jsonl"):
        assert (finished.directory / name).is_file()
        assert name in text
    said = []
    for line in text.partition("Look further\n")[2].splitlines():
        program, *arguments = shlex.split(line)
        assert Path(program) == Path(sys.executable).with_name("tokcap")
        result = subprocess.run([program, *arguments], capture_output=True, text=True)
        assert result.returncode == 0, line + result.stderr
        said.append(result.stdout)
    assert [one for one in MASKED if one not in said[0]] == []
    assert "capture_incomplete" in said[1]
    assert said[2].startswith("rollout lost-call:")
    assert (finished.directory / "lost-call.html").is_file()
    assert said[4].count("lost-call") == 1


def test_where_the_program_is_found_it_is_called_by_its_name(
    finished: Finished, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert "\n  tokcap ls --database " in printed(finished, capsys)


async def test_the_checks_pass_again_on_what_the_demo_left(finished: Finished) -> None:
    outcomes = await finished.check(finished.lines)
    assert [outcome.problems for outcome in outcomes] == [[]] * len(STORIES)


def shift_log_prob(row: dict[str, Any]) -> None:
    generated_items(row)[1]["generation_log_probs"][0] += 1e-6


def swap_token(row: dict[str, Any]) -> None:
    for item in row["response"]["output"]:
        if "prompt_token_ids" in item:
            item["prompt_token_ids"][5] ^= 1


def lose_a_turn(row: dict[str, Any]) -> None:
    row["response"]["output"].remove(generated_items(row)[1])


def mask(row: dict[str, Any]) -> None:
    row["mask_sample"] = True


def generated_items(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [item for item in row["response"]["output"] if "generation_token_ids" in item]


def strip_tokens(row: dict[str, Any]) -> None:
    row["response"]["output"] = []


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (shift_log_prob, "differs from the policy's own by 1e-06"),
        (swap_token, "differs from the policy's own"),
        (lose_a_turn, "tokens were delivered, but the agent went on from"),
        (mask, "mask_sample=True"),
        (strip_tokens, "carries no tokens"),
    ],
)
async def test_a_damaged_row_is_noticed(finished: Finished, damage: Callable[[Any], None], problem: str) -> None:
    rows = [json.loads(line) for line in finished.lines]
    damage(next(row for row in rows if row["_ng_rollout_id"] == "steady-3"))
    outcomes = await finished.check([json.dumps(row).encode() for row in rows])
    found = {outcome.rollout_id: outcome.problems for outcome in outcomes if outcome.problems}
    assert list(found) == ["steady-3"]
    assert problem in found["steady-3"][0]


async def test_a_missing_row_and_an_outcome_that_was_not_expected_are_noticed(finished: Finished) -> None:
    lines = [line for line in finished.lines if b"steady-1" not in line]
    rollouts = finished.rollouts
    rollouts[-1].killed_pid = None
    rollouts[-1].story, rollouts[-2].story = rollouts[-2].story, rollouts[-1].story
    problems = {one.rollout_id: one.problems for one in await finished.check(lines, rollouts)}
    assert problems["steady-1"] == ["it has no training row"]
    assert "calls were lost by the processes" in problems["lost-call"][0]


def test_a_problem_is_printed_and_ends_in_exit_code_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcome = CheckedRollout("steady-1", "whole responses", 5, "delivered", problems=["it has no training row"])
    report = Report(tmp_path, True, 1.0, [outcome], tmp_path / "a", tmp_path / "b", tmp_path / "c")
    monkeypatch.setattr(demo_run, "run_demo", lambda directory, keep: report)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 1
    assert "tokcap: steady-1: it has no training row" in result.stderr
    assert "very log probability" not in result.stdout


def test_a_directory_in_use_is_refused(finished: Finished) -> None:
    result = CliRunner().invoke(app, ["demo", "--directory", str(finished.directory)])
    assert result.exit_code == 2
    assert result.stderr == f"tokcap: {finished.directory} is not empty: name a new directory\n"


def test_an_interrupted_demo_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    directory = tmp_path / "demo"
    process = subprocess.Popen(
        [*DEMO, "--directory", str(directory), "--no-keep"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    log = directory / "gateway.log"
    until(lambda: log.exists() and "listening on" in log.read_text())
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT
    assert (stdout, stderr.splitlines()[-1]) == ("", "tokcap: interrupted; nothing is left running")
    assert not directory.exists()
    assert processes_of(directory) == []
