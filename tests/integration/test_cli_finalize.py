"""``tokcap finalize``: the rows it writes, what it refuses, and that an interruption costs nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.commands import RunTokcap
from support.finalizing import (
    BETWEEN,
    FIRST,
    LOG_PROBS,
    LOSS_MASK,
    PROMPT,
    SECOND,
    SEQUENCE,
    Bench,
    as_line,
    record,
    two_turns,
)
from token_id_capture.store import TokenCaptureStore


@pytest.fixture
def bench(tmp_path: Path, tokcap: RunTokcap) -> Bench:
    return Bench(tmp_path, tokcap)


# The rows


def test_a_record_gets_its_rebuilt_response_and_keeps_every_other_field(bench: Bench) -> None:
    bench.capture([0])
    given = record(0)
    bench.write(given)
    done = bench.finalize()
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr == "tokcap: 1 row written, 0 of them masked\n"
    [row] = bench.rows()
    assert [item["generation_token_ids"] for item in row["response"]["output"]] == [FIRST, SECOND]
    assert [item["prompt_token_ids"] for item in row["response"]["output"]] == [PROMPT, SEQUENCE[:7]]
    capture = row.pop("_ng_token_capture")
    assert (capture["rollout_id"], capture["version"], capture["reason"]) == ("0-0", 1, "")
    assert capture["snapshot_id"]
    row["response"]["output"] = given["response"]["output"]
    assert row == given


def test_a_trajectory_row_is_flat_and_keeps_all_but_the_response(bench: Bench) -> None:
    bench.capture([0])
    given = record(0)
    bench.write(given)
    assert bench.finalize("--format", "trajectory").returncode == 0
    [row] = bench.rows()
    capture = row.pop("_ng_token_capture")
    del given["response"]
    assert row == {
        **given,
        "rollout_id": "0-0",
        **dict.fromkeys(("parent", "parent_token", "agent", "purpose", "cause")),
        **{"sequence": 0, "sequences": 1, "segment": 0, "multimodal": False, "continuity": None},
        **{name: row[name] for name in ("finish_reason", "truncated", "prompt_length", "turn_spans")},
        **{"sampling": None, "log_probs_mode": None, "weight_versions": []},
        "token_ids": SEQUENCE,
        "loss_mask": LOSS_MASK,
        "log_probs": LOG_PROBS,
        "mask_sample": False,
        "mask_reason": None,
        "snapshot_id": capture["snapshot_id"],
        "version": 1,
    }


def test_rows_come_in_the_order_of_the_input(bench: Bench) -> None:
    tasks = [(task * 17) % 50 for task in range(50)]
    bench.capture(tasks)
    bench.write(*(record(task) for task in tasks))
    assert bench.summary("--format", "trajectory")["written"] == 50
    assert [row["_ng_task_index"] for row in bench.rows()] == tasks


def test_a_masked_rollout_says_why_and_gives_nothing_to_train_on(bench: Bench) -> None:
    bench.capture([0, 1], incomplete=[1])
    bench.write(record(0), record(1))
    done = bench.summary("--format", "trajectory", "--retire")
    assert (done["code"], done["written"], done["masked"], done["retired"]) == (0, 2, 1, 1)
    assert done["reasons"] == {"capture_incomplete": 1}
    row = bench.rows()[1]
    assert (row["mask_sample"], row["mask_reason"]) == (True, "capture_incomplete")
    assert row["token_ids"] == row["loss_mask"] == row["log_probs"] == []
    assert bench.states() == {"0-0": ("retired", "delivered"), "1-0": ("frozen", "masked")}


def test_a_masked_record_keeps_the_response_of_the_harness(bench: Bench) -> None:
    bench.capture([0], incomplete=[0])
    bench.write(record(0))
    assert bench.finalize().returncode == 0
    [row] = bench.rows()
    assert row["mask_sample"] is True
    assert row["response"] == record(0)["response"]


def test_a_mask_of_the_harness_is_never_lifted(bench: Bench) -> None:
    bench.capture([0])
    bench.write(record(0, mask_sample=True))
    assert bench.summary("--format", "trajectory", "--retire")["retired"] == 1
    [row] = bench.rows()
    assert (row["mask_sample"], row["mask_reason"], row["token_ids"]) == (True, None, SEQUENCE)


def test_without_retire_the_delivery_is_recorded_and_the_captures_stay(bench: Bench) -> None:
    bench.capture([0])
    bench.write(record(0))
    assert bench.finalize().returncode == 0
    assert bench.states() == {"0-0": ("frozen", "delivered")}


def test_the_id_may_stand_in_a_field_of_your_own(bench: Bench) -> None:
    bench.capture([3])
    bench.write({"episode": "3-0", "reward": 1}, {"reward": 1})
    done = bench.finalize("--id-field", "episode", "--format", "trajectory")
    assert done.returncode == 1
    assert "line 2 is refused: no rollout id: the record has no field 'episode'" in done.stderr
    assert [row["token_ids"] for row in bench.rows()] == [SEQUENCE]


def test_an_explicit_id_and_an_attempt_are_understood(bench: Bench) -> None:
    async def put() -> None:
        async with TokenCaptureStore(bench.database) as store:
            for rollout_id in ("chosen", "4-2-a1"):
                await asyncio.gather(*map(store.put, two_turns(rollout_id)))

    asyncio.run(put())
    bench.write({"_ng_rollout_id": "chosen"}, {"_ng_task_index": 4, "_ng_rollout_index": 2, "_ng_attempt_index": 1})
    assert bench.finalize("--format", "trajectory").returncode == 0
    assert [row["rollout_id"] for row in bench.rows()] == ["chosen", "4-2-a1"]


def test_records_may_come_through_a_pipe(bench: Bench) -> None:
    bench.capture([0, 1])
    assert bench.finalize(stdin=as_line(record(0)) + as_line(record(1))).returncode == 0
    assert [row["_ng_task_index"] for row in bench.rows()] == [0, 1]


def test_numbers_and_text_that_json_libraries_disagree_on_pass_unharmed(bench: Bench) -> None:
    bench.capture([0, 1, 2])
    texts = ['"seed": 123456789012345678901234567890', '"loss": NaN, "best": -Infinity', '"text": "\\ud800"']
    bench.write(*(f'{{"_ng_task_index": {task}, "_ng_rollout_index": 0, {text}}}' for task, text in enumerate(texts)))
    assert bench.summary("--format", "trajectory")["masked"] == 0
    big, not_numbers, surrogate = bench.rows()
    assert big["seed"] == 123456789012345678901234567890
    assert not_numbers["loss"] != not_numbers["loss"]
    assert not_numbers["best"] == float("-inf")
    assert surrogate["text"] == "\ud800"
    assert big["token_ids"] == not_numbers["token_ids"] == surrogate["token_ids"] == SEQUENCE
    again = bench.summary("--format", "trajectory")
    assert (again["code"], again["already_there"]) == (0, 3)


# Records that carry their own token ids


def carrying(task: int) -> dict[str, Any]:
    items = [
        {
            "type": "message",
            "prompt_token_ids": prompt,
            "generation_token_ids": generation,
            "generation_log_probs": [-0.25] * len(generation),
        }
        for prompt, generation in [(PROMPT, FIRST), ([*PROMPT, *FIRST, *BETWEEN], SECOND)]
    ]
    return record(task, response={"output": items})


def test_a_record_with_token_ids_passes_byte_for_byte_and_its_capture_is_retired(bench: Bench) -> None:
    bench.capture([0])
    text = json.dumps(carrying(0), indent=None, separators=(" , ", " : "))
    bench.write(text)
    done = bench.summary("--retire")
    assert (done["code"], done["written"], done["masked"], done["retired"]) == (0, 1, 0, 1)
    assert bench.output.read_text() == text + "\n"
    assert bench.states() == {"0-0": ("retired", "delivered")}
    again = bench.summary("--retire")
    assert (again["code"], again["already_there"]) == (0, 1)


def test_a_redundant_capture_that_was_kept_is_retired_by_a_later_run(bench: Bench) -> None:
    bench.capture([0])
    bench.write(carrying(0))
    assert bench.summary()["retired"] == 0
    assert bench.summary("--retire")["retired"] == 1
    assert bench.states()["0-0"][0] == "retired"


def test_a_record_with_token_ids_needs_no_capture(bench: Bench) -> None:
    bench.capture([9])
    bench.write(carrying(0))
    assert bench.summary("--format", "trajectory")["code"] == 0
    [row] = bench.rows()
    assert (row["token_ids"], row["loss_mask"], row["log_probs"]) == (SEQUENCE, LOSS_MASK, LOG_PROBS)
    assert (row["mask_sample"], row["snapshot_id"]) == (False, "")


def test_malformed_token_ids_of_a_record_mask_its_trajectory(bench: Bench) -> None:
    bench.capture([0])
    given = carrying(0)
    del given["response"]["output"][1]["generation_log_probs"]
    bench.write(given)
    assert bench.summary("--format", "trajectory")["reasons"] == {"build_failed": 1}
    [row] = bench.rows()
    assert (row["mask_sample"], row["mask_reason"], row["token_ids"]) == (True, "build_failed", [])


# What is refused, by line


def test_broken_lines_are_named_and_the_others_are_done(bench: Bench) -> None:
    bench.capture([0, 1])
    bench.write(
        record(0),
        "{not json",
        b'{"note": "\xff\xfe"}',
        "[1, 2]",
        "",
        {"reward": 1},
        {"_ng_rollout_id": "../x"},
        {"_ng_task_index": "7", "_ng_rollout_index": 0},
        "[" * 100_000,
        record(1),
    )
    done = bench.finalize()
    assert done.returncode == 1
    refused = [line for line in done.stderr.splitlines() if "is refused" in line]
    assert [int(line.split()[2]) for line in refused] == [2, 3, 4, 6, 7, 8, 9]
    assert "not a JSON object, but list" in refused[2]
    assert "--id-field" in refused[3]
    assert "'../x'" in refused[4]
    assert [row["_ng_task_index"] for row in bench.rows()] == [0, 1]
    assert ", 7 refused" in done.stderr


def test_a_second_record_of_one_rollout_is_refused_by_its_line(bench: Bench) -> None:
    bench.capture([0])
    bench.write(record(0), record(0, reward=9))
    done = bench.finalize()
    assert done.returncode == 1
    assert "line 2 is refused: rollout '0-0' is already in line 1" in done.stderr
    assert [row["reward"] for row in bench.rows()] == [0.0]


@pytest.mark.parametrize("row_format", ["record", "trajectory"])
def test_a_rollout_that_nobody_captured_is_masked_and_named(bench: Bench, row_format: str) -> None:
    bench.capture([0])
    bench.write(record(7), record(0))
    done = bench.finalize("--format", row_format, "--retire")
    assert done.returncode == 1
    assert "line 1: no rollout '7-0' is in this database" in done.stderr
    unknown, known = bench.rows()
    assert unknown["mask_sample"] is True
    assert unknown["_ng_token_capture"]["reason"] == "nothing_recorded"
    assert not known.get("mask_sample")
    assert "7-0" not in bench.states()


def test_corrupt_captures_mask_their_rollout_and_name_the_call(bench: Bench) -> None:
    bench.capture([0, 1])
    with contextlib.closing(sqlite3.connect(bench.database)) as connection:
        connection.execute("UPDATE entries SET generation = zeroblob(length(generation)) WHERE rollout_id = '0-0'")
        connection.commit()
    bench.write(record(0), record(1))
    done = bench.finalize()
    assert done.returncode == 1
    assert "line 1: its row is masked" in done.stderr
    assert [row["_ng_token_capture"]["reason"] for row in bench.rows()] == ["freeze_failed", ""]


def test_a_rollout_retired_by_somebody_else_is_masked_and_named(bench: Bench) -> None:
    bench.capture([0])
    bench.write(record(0))
    assert bench.summary("--retire")["retired"] == 1
    bench.output.unlink()
    done = bench.finalize()
    assert done.returncode == 1
    assert "line 1: its row is masked: rollout '0-0' is retired" in done.stderr


# What is refused as a whole: one line, exit 2, nothing written


def one_line(finished: subprocess.CompletedProcess[str]) -> str:
    assert finished.returncode == 2, finished.stderr
    assert finished.stderr.count("\n") == 1, finished.stderr
    return finished.stderr


def test_a_missing_database_is_not_made_and_no_output_either(bench: Bench) -> None:
    bench.write(record(0))
    assert str(bench.database) in one_line(bench.finalize())
    assert sorted(path.name for path in bench.directory.iterdir()) == ["rollouts.jsonl"]


def test_a_missing_input_is_named(bench: Bench) -> None:
    bench.capture([0])
    assert "cannot read" in one_line(bench.finalize())
    assert not bench.output.exists()


def test_an_output_in_a_missing_directory_is_named(bench: Bench) -> None:
    bench.capture([0])
    bench.write(record(0))
    assert "cannot write" in one_line(bench.finalize("--output", bench.directory / "none" / "train.jsonl"))


def test_an_output_that_cannot_be_durable_is_refused(bench: Bench) -> None:
    bench.capture([0])
    bench.write(record(0))
    assert "regular file" in one_line(bench.finalize("--output", os.devnull, "--file-format", "jsonl"))


def test_the_input_is_never_the_output(bench: Bench) -> None:
    bench.capture([0])
    bench.write(record(0))
    before = bench.rollouts.read_bytes()
    (bench.directory / "link.jsonl").symlink_to(bench.rollouts)
    assert "is the input" in one_line(bench.finalize("--output", bench.directory / "link.jsonl"))
    assert bench.rollouts.read_bytes() == before


@pytest.mark.parametrize(
    "content",
    ["my notes", "my notes\n", '{"reward": 1}\n', '{"_ng_rollout_id": "x"}\n', '{"half": \n', '["a"]', "\n\n"],
    ids=["text", "text line", "no id", "no row", "broken line", "array", "blank"],
)
def test_an_output_that_holds_something_else_is_left_as_it_is(bench: Bench, content: str) -> None:
    bench.capture([0])
    bench.write(record(0))
    bench.output.write_text(content)
    assert "line 1 is not a row of this command" in one_line(bench.finalize())
    assert bench.output.read_text() == content


def test_rows_of_the_other_format_are_not_mixed_in(bench: Bench) -> None:
    bench.capture([0])
    bench.write(record(0))
    assert bench.finalize("--format", "trajectory").returncode == 0
    before = bench.output.read_bytes()
    assert "not a row of --format record" in one_line(bench.finalize("--format", "record"))
    assert bench.output.read_bytes() == before


# Going on after an interruption


# Too many masked rollouts
