"""``tokcap finalize`` to outputs that cannot grow: the same rows in every form, as durable, and nothing replaced."""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pandas
import polars
import pyarrow
import pytest
from pyarrow import parquet

from support.captured import one_line
from support.commands import TOKCAP, RunTokcap, clean_environment
from support.finalizing import Bench, feed_and_wait, record, running

TRAJECTORY = ("--format", "trajectory")


@pytest.fixture
def bench(tmp_path: Path, tokcap: RunTokcap) -> Bench:
    return Bench(tmp_path, tokcap)


def full(bench: Bench, *, records: int = 4) -> None:
    """Rollouts with nested fields; the last but one is masked, and the last was never captured."""
    bench.capture(range(records - 1), incomplete=[records - 2])
    bench.write(*(record(task, info={"seed": task, "tags": ["a"] * task}, ok=True) for task in range(records)))


def to(bench: Bench, name: str, *options: object) -> subprocess.CompletedProcess[str]:
    output = name if "://" in name else bench.directory / name
    return bench.finalize("--output", output, *options)


def json_lines(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data.splitlines()]


def from_gzip(path: Path) -> list[dict[str, Any]]:
    return json_lines(gzip.decompress(path.read_bytes()))


def from_zstandard(path: Path) -> list[dict[str, Any]]:
    return json_lines(pyarrow.input_stream(str(path), compression="zstd").read())


def from_parquet(path: Path) -> list[dict[str, Any]]:
    return list(parquet.read_table(path).to_pylist())


def said(value: Any) -> Any:
    """A value without keys that are null or hold nothing: a struct has the keys of all rows."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: said(item) for key, item in value.items() if said(item) is not None} or None
    if isinstance(value, list):
        return list(map(said, value))
    return None if value is pandas.NA or value != value else value


FORMS: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    "rows.jsonl.gz": from_gzip,
    "rows.jsonl.zst": from_zstandard,
    "rows.parquet": from_parquet,
}


@pytest.mark.parametrize(
    ("name", "row_format"),
    [("rows.jsonl.gz", "record"), ("rows.jsonl.zst", "trajectory"), ("rows.parquet", "record")],
)
def test_every_form_has_the_same_rows_and_captures_are_retired_once_they_are_durable(
    bench: Bench, name: str, row_format: str
) -> None:
    full(bench)
    done = to(bench, name, "--format", row_format)
    assert done.returncode == 1, done.stderr  # one rollout is unknown
    assert bench.finalize("--format", row_format).returncode == 1
    assert [said(row) for row in FORMS[name](bench.directory / name)] == [said(row) for row in bench.rows()]
    (bench.directory / name).unlink()
    assert to(bench, name, "--format", row_format, "--retire").returncode == 1
    assert len(FORMS[name](bench.directory / name)) == 4
    assert [state for state, _ in bench.states().values()] == ["retired", "retired", "frozen"]
    assert sorted(os.listdir(bench.directory)) == sorted(
        {path.name for path in bench.directory.glob("captures*")} | {name, "rollouts.jsonl", "train.jsonl"}
    )


def test_parquet_and_json_lines_are_equal_to_their_readers(bench: Bench) -> None:
    full(bench)
    assert bench.finalize(*TRAJECTORY).returncode == to(bench, "train.parquet", *TRAJECTORY).returncode == 1
    packed = bench.directory / "train.parquet"
    readers: dict[str, Callable[[], tuple[Any, Any]]] = {
        "pandas": lambda: (
            pandas.read_json(bench.output, lines=True, dtype=False, precise_float=True),
            pandas.read_parquet(packed),
        ),
        "polars": lambda: (
            polars.read_ndjson(bench.output).to_pandas(),
            polars.read_parquet(packed).to_pandas(),
        ),
        "duckdb": lambda: (
            duckdb.read_json(str(bench.output)).df(),
            duckdb.read_parquet(str(packed)).df(),
        ),
    }
    for reader, read in readers.items():
        lines, columns = read()
        assert list(lines.columns) == list(columns.columns), reader
        for name in lines.columns:
            assert [said(one) for one in lines[name]] == [said(one) for one in columns[name]], (reader, name)
    schema = parquet.read_schema(packed)
    assert (str(schema.field("token_ids").type), str(schema.field("reward").type)) == ("list<element: int32>", "double")


def test_shards_have_so_many_rows_each_and_replace_all_of_an_earlier_output(bench: Bench) -> None:
    full(bench)
    assert to(bench, "rows.parquet", *TRAJECTORY, "--shard-rows", 1).returncode == 1
    shards = sorted(bench.directory.glob("rows-*.parquet"))
    assert [path.name for path in shards] == [f"rows-{number:05}.parquet" for number in range(4)]
    assert sum(len(from_parquet(path)) for path in shards) == 4
    assert len({str(parquet.read_schema(path)) for path in shards}) == 1
    refused = to(bench, "rows.parquet", *TRAJECTORY, "--shard-rows", 2)
    assert (refused.returncode, "is there already and is not replaced" in one_line(refused.stderr)) == (2, True)
    bench.write(*(record(task) for task in range(3)))
    assert to(bench, "rows.parquet", *TRAJECTORY, "--shard-rows", 2, "--overwrite").returncode == 0
    shards = sorted(bench.directory.glob("rows-*.parquet"))
    assert [len(from_parquet(path)) for path in shards] == [2, 1]


@pytest.mark.parametrize("name", ["train.jsonl", "rows.parquet"])
def test_an_output_that_may_hold_the_only_row_of_a_rollout_is_never_replaced(bench: Bench, name: str) -> None:
    full(bench, records=3)
    bench.write(record(0))
    assert to(bench, name, *TRAJECTORY, "--retire").returncode == 0
    before = (bench.directory / name).read_bytes()
    stopped = to(bench, name, *TRAJECTORY, "--overwrite")
    assert stopped.returncode == 1
    assert "rollout '0-0' is not in this database any more" in stopped.stderr
    assert (bench.directory / name).read_bytes() == before


def test_a_killed_run_keeps_its_rows_and_the_same_command_makes_the_output(bench: Bench) -> None:
    bench.capture(range(4))
    output = bench.directory / "rows.parquet"
    with running(bench, *TRAJECTORY, "--retire", "--output", str(output)) as process:
        feed_and_wait(bench, process, [0, 1], into=bench.directory / "rows.parquet.rows.jsonl")
        process.kill()
    assert not output.exists()
    bench.write(*(record(task) for task in range(4)))
    finished = to(bench, "rows.parquet", *TRAJECTORY, "--retire")
    assert finished.returncode == 0, finished.stderr
    assert [row["rollout_id"] for row in from_parquet(output)] == [f"{task}-0" for task in range(4)]
    assert {state for state, _ in bench.states().values()} == {"retired"}
    assert not (bench.directory / "rows.parquet.rows.jsonl").exists()


def test_an_interrupt_says_where_the_rows_are(bench: Bench) -> None:
    bench.capture(range(2))
    with running(bench, *TRAJECTORY, "--output", str(bench.directory / "rows.parquet")) as process:
        feed_and_wait(bench, process, [0], into=bench.directory / "rows.parquet.rows.jsonl")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 143
    assert f"the rows so far are in {bench.directory}/rows.parquet.rows.jsonl" in errors.decode()
    assert not (bench.directory / "rows.parquet").exists()


def test_rows_that_do_not_fit_stay_as_json_lines(bench: Bench) -> None:
    bench.capture([])
    item = {"type": "message", "prompt_token_ids": [1], "generation_token_ids": [2**32 - 1]}
    item["generation_log_probs"] = [-0.5]
    bench.write({"_ng_rollout_id": "a", "response": {"output": [item]}})
    refused = to(bench, "rows.parquet", *TRAJECTORY)
    assert refused.returncode == 2
    assert "too large for the int32 column" in one_line(refused.stderr)
    assert one_line(refused.stderr).endswith("the rows are in " + str(bench.directory / "rows.parquet.rows.jsonl"))
    [row] = json_lines((bench.directory / "rows.parquet.rows.jsonl").read_bytes())
    assert row["token_ids"] == [1, 2**32 - 1]


def test_rows_behind_a_url_are_whole_and_nothing_is_called_delivered(bench: Bench) -> None:
    bench.capture([0])
    bench.write(record(0))
    url = f"file://{bench.directory}/rows.parquet"
    assert to(bench, url, *TRAJECTORY).returncode == 0
    assert len(from_parquet(bench.directory / "rows.parquet")) == 1
    assert bench.states() == {"0-0": ("frozen", None)}
    assert "--overwrite" in one_line(to(bench, url, *TRAJECTORY).stderr)
    assert to(bench, url, *TRAJECTORY, "--overwrite").returncode == 0


@pytest.mark.parametrize("command", ["export", "finalize"])
def test_parquet_goes_through_a_pipe(bench: Bench, command: str) -> None:
    bench.capture([0])
    bench.write(record(0))
    options = [bench.rollouts, *TRAJECTORY] if command == "finalize" else ["--include-open"]
    arguments = [command, "-d", bench.database, "-o", "-", "--file-format", "parquet", *options]
    done = subprocess.run([TOKCAP, *map(str, arguments)], capture_output=True, env=clean_environment(), check=False)
    assert done.returncode == 0, done.stderr
    [row] = parquet.read_table(io.BytesIO(done.stdout)).to_pylist()
    assert row["rollout_id"] == "0-0"


def test_rollouts_can_be_named_with_their_records_or_without(bench: Bench) -> None:
    bench.capture(range(3))
    bench.write(record(0), record(1))
    done = bench.summary(*TRAJECTORY, "1-0", "2-0")
    assert (done["code"], done["written"], done["without_record"]) == (1, 1, 1)
    assert [row["rollout_id"] for row in bench.rows()] == ["1-0"]
    assert [state for state, _ in bench.states().values()] == ["open", "frozen", "open"]

    arguments = ["finalize", "0-0", "9-9", "-d", bench.database, "-o", bench.output, *TRAJECTORY]
    named = bench.tokcap(*arguments)
    assert named.returncode == 1
    assert "no rollout '9-9' is in this database, and there is no file of this name" in named.stderr
    assert [row["rollout_id"] for row in bench.rows()] == ["1-0", "0-0"]
    assert bench.tokcap(*arguments, "--records", bench.rollouts).returncode == 1
    assert len(bench.rows()) == 2
    assert "name the records" in one_line(bench.tokcap("finalize", "-d", bench.database, "-o", bench.output).stderr)


def test_rollouts_that_were_opened_before_since_are_left_out(bench: Bench) -> None:
    bench.capture([0])
    bench.write(record(0), record(1))
    done = bench.summary("--since", "2999-01-01")
    assert (done["code"], done["before"], done["written"], done["unknown"]) == (1, 1, 1, 1)
    assert bench.summary("--since", "1h")["written"] == 1


def test_without_a_row_there_is_no_file_and_nothing_is_finalized_that_cannot_be_written(bench: Bench) -> None:
    bench.capture([0])
    bench.write()
    empty = to(bench, "rows.parquet")
    assert (empty.returncode, (bench.directory / "rows.parquet").exists()) == (1, False)
    assert "no file was written" in empty.stderr
    bench.write(record(0))
    (bench.directory / "rows.parquet").write_bytes(b"mine")
    assert to(bench, "rows.parquet").returncode == 2
    assert bench.states() == {"0-0": ("open", None)}


def test_rows_that_were_left_behind_after_the_output_was_made_replace_it_on_request(bench: Bench) -> None:
    bench.capture([0])
    bench.write(record(0))
    assert to(bench, "rows.parquet.rows.jsonl", *TRAJECTORY, "--retire").returncode == 0
    (bench.directory / "rows.parquet").write_bytes(b"of the run that was killed before it removed its rows")
    refused = to(bench, "rows.parquet", *TRAJECTORY, "--retire")
    assert "--overwrite replaces it with the rows of" in one_line(refused.stderr)
    assert to(bench, "rows.parquet", *TRAJECTORY, "--retire", "--overwrite").returncode == 0
    assert [row["rollout_id"] for row in from_parquet(bench.directory / "rows.parquet")] == ["0-0"]


@pytest.mark.parametrize("name", ["rows", "rows.txt", "rows.2026"])
def test_a_name_that_says_no_form_gets_json_lines(bench: Bench, name: str) -> None:
    full(bench)
    to(bench, name)
    assert len(json_lines((bench.directory / name).read_bytes())) == 4
