"""``tokcap finalize`` run again: after a stop, a kill, a torn row or a change, and with what was masked."""

from __future__ import annotations

import asyncio
import fcntl
import json
import signal
import subprocess
from pathlib import Path

import pytest

from support.commands import RunTokcap
from support.finalizing import (
    Bench,
    feed_and_wait,
    record,
    running,
)
from token_id_capture import reasons
from token_id_capture.store import TokenCaptureStore


@pytest.fixture
def bench(tmp_path: Path, tokcap: RunTokcap) -> Bench:
    return Bench(tmp_path, tokcap)


def one_line(finished: subprocess.CompletedProcess[str]) -> str:
    assert finished.returncode == 2, finished.stderr
    assert finished.stderr.count("\n") == 1, finished.stderr
    return finished.stderr


def test_two_runs_never_write_one_output_at_once(bench: Bench) -> None:
    bench.capture([0])
    bench.write(record(0))
    with bench.output.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "another process writes" in one_line(bench.finalize())


def test_a_second_run_repeats_nothing(bench: Bench) -> None:
    bench.capture(range(20), incomplete=[3])
    bench.write(*(record(task) for task in range(20)))
    assert bench.summary()["written"] == 20
    before = bench.output.read_bytes()
    again = bench.summary()
    assert (again["code"], again["written"], again["already_there"]) == (0, 0, 20)
    assert bench.output.read_bytes() == before


@pytest.mark.parametrize("row_format", ["record", "trajectory"])
def test_rows_delivered_but_not_retired_are_retired_by_a_second_run(bench: Bench, row_format: str) -> None:
    bench.capture([0, 1, 2], incomplete=[1])
    bench.write(record(0), record(1), record(2))
    assert bench.summary("--format", row_format)["retired"] == 0
    again = bench.summary("--format", row_format, "--retire")
    assert (again["code"], again["already_there"], again["retired"]) == (0, 3, 2)
    states = {rollout: state for rollout, (state, _) in bench.states().items()}
    assert states == {"0-0": "retired", "1-0": "frozen", "2-0": "retired"}
    assert bench.summary("--format", row_format, "--retire")["retired"] == 0


@pytest.mark.parametrize("kept", [1, 40, -2, -1])
def test_a_torn_last_row_is_cut_off_and_written_again(bench: Bench, kept: int) -> None:
    bench.capture([0, 1])
    bench.write(record(0), record(1))
    assert bench.finalize().returncode == 0
    whole = bench.output.read_bytes()
    first, second = whole.splitlines(keepends=True)
    bench.output.write_bytes(first + second[:kept])
    assert bench.summary()["code"] == 0
    assert bench.output.read_bytes() == whole


def test_a_rollout_that_changed_after_its_row_was_written_is_not_retired(bench: Bench) -> None:
    bench.capture([0])
    bench.write(record(0))
    assert bench.finalize().returncode == 0

    async def mark() -> None:
        async with TokenCaptureStore(bench.database) as store:
            await store.mark_incomplete("0-0", "late", reasons.CALL_LOST)

    asyncio.run(mark())
    done = bench.finalize("--retire")
    assert done.returncode == 1
    assert "line 1: rollout '0-0' was not retired" in done.stderr
    assert bench.states()["0-0"][0] == "frozen"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_row_and_says_how_to_go_on(bench: Bench, number: signal.Signals, code: int) -> None:
    bench.capture(range(4))
    with running(bench, "--retire") as process:
        feed_and_wait(bench, process, [0, 1])
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    assert process.returncode == code
    assert b"run the same command again to continue" in said
    assert b"Traceback" not in said
    assert len(bench.rows()) == 2
    bench.write(*(record(task) for task in range(4)))
    done = bench.summary("--retire")
    assert (done["code"], done["written"], done["already_there"]) == (0, 2, 2)
    assert {state for state, _ in bench.states().values()} == {"retired"}


def test_a_killed_run_loses_nothing_and_repeats_nothing(bench: Bench) -> None:
    bench.capture(range(40))
    with running(bench, "--retire") as process:
        feed_and_wait(bench, process, range(20))
        process.kill()
    bench.write(*(record(task) for task in range(40)))
    done = bench.summary("--retire")
    assert (done["code"], done["written"]) == (0, 40 - done["already_there"])
    assert [row["_ng_task_index"] for row in bench.rows()] == list(range(40))
    assert {state for state, _ in bench.states().values()} == {"retired"}


def test_a_run_that_masks_too_much_stops_after_the_row_that_told(bench: Bench) -> None:
    masked = [1, 2, 4, 5]
    bench.capture(range(30), incomplete=masked)
    bench.write(*(record(task) for task in range(30)))
    done = bench.finalize("--max-mask-fraction", 0.5, "--mask-fraction-min-samples", 3, "--json")
    # 2 of 3 are more than a half; 1 of 2 was too few to tell.
    assert done.returncode == 1
    assert [row["_ng_task_index"] for row in bench.rows()] == [0, 1, 2]
    assert "2 of 3 rollouts are masked" in done.stderr
    assert "2 masked: capture_incomplete" in done.stderr
    assert json.loads(done.stdout)["stopped"]


def test_exactly_the_allowed_fraction_does_not_stop(bench: Bench) -> None:
    bench.capture(range(4), incomplete=[1, 3])
    bench.write(*(record(task) for task in range(4)))
    done = bench.summary("--max-mask-fraction", 0.5, "--mask-fraction-min-samples", 1)
    assert (done["code"], done["written"], done["stopped"]) == (0, 4, None)


def test_a_stopped_run_goes_on_with_the_rest(bench: Bench) -> None:
    bench.capture(range(6), incomplete=range(6))
    bench.write(*(record(task) for task in range(6)))
    assert bench.summary("--max-mask-fraction", 0, "--mask-fraction-min-samples", 2)["written"] == 2
    assert bench.summary()["written"] == 4
    assert [row["_ng_task_index"] for row in bench.rows()] == list(range(6))


@pytest.mark.parametrize("fraction", ["-0.1", "1.5", "half"])
def test_a_fraction_outside_zero_to_one_is_a_usage_error(bench: Bench, fraction: str) -> None:
    bench.capture([0])
    bench.write(record(0))
    refused = bench.finalize("--max-mask-fraction", fraction)
    assert refused.returncode == 2
    assert "--max-mask-fraction" in refused.stderr
    assert not bench.output.exists()


@pytest.mark.parametrize("row_format", ["trajectory", "record"])
def test_masked_rows_are_kept_dropped_or_filled_with_a_placeholder(bench: Bench, row_format: str) -> None:
    bench.capture([0])
    bench.write(record(0), {**record(1), "reward": 0.5})
    found = {}
    for masked in ("keep", "drop", "placeholder"):
        bench.output.unlink(missing_ok=True)
        assert bench.finalize("--format", row_format, "--masked", masked).returncode == 1
        found[masked] = bench.rows()
    assert [len(rows) for rows in found.values()] == [2, 1, 2]
    for masked in ("keep", "placeholder"):
        row = found[masked][1]
        assert (row["mask_sample"], row["reward"]) == (True, 0.5)
    row = found["placeholder"][1]
    if row_format == "trajectory":
        assert (row["token_ids"], row["loss_mask"], row["log_probs"]) == ([0], [0], [0.0])
        assert row["mask_reason"] == "nothing_recorded"
    else:
        [item] = row["response"]["output"]
        assert (item["generation_token_ids"], item["generation_log_probs"]) == ([0], [0.0])
        assert row["_ng_token_capture"]["reason"] == "nothing_recorded"


def test_a_dropped_rollout_is_counted_and_looked_at_again(bench: Bench) -> None:
    bench.capture([1])
    bench.write(record(0))
    for _ in range(2):
        done = bench.finalize("--masked", "drop")
        assert "0 rows written, 0 of them masked, 1 masked and dropped" in done.stderr
    bench.capture([0])
    assert bench.finalize("--masked", "drop").returncode == 0
    assert len(bench.rows()) == 1
