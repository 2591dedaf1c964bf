"""``tokcap export``: what goes out, what is left out, and that nothing is changed by it."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pandas
import pyarrow
import pytest
from pyarrow import parquet

from support.commands import TOKCAP, RunTokcap
from support.fates import EPOCH, entry, fill, lines
from support.many_rollouts import database_with
from token_id_capture.store import TokenCaptureStore


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rollout of each fate; their ids say which."""
    path = tmp_path_factory.mktemp("database") / "captures.db"
    asyncio.run(fill(path))
    return path


def content(database: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        return list(connection.iterdump())


@pytest.mark.parametrize("arguments", [["export", "-o", "-"], ["verify"]], ids=lambda arguments: arguments[0])
def test_a_command_that_reads_everything_lets_servers_go_first(database: Path, arguments: list[str]) -> None:
    command = [str(TOKCAP), *arguments, "-d", str(database)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        os.waitid(os.P_PID, run.pid, os.WEXITED | os.WNOWAIT)
        assert os.getpriority(os.PRIO_PROCESS, run.pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)


def test_each_frozen_unmasked_rollout_is_one_row(tokcap: RunTokcap, database: Path, tmp_path: Path) -> None:
    done = tokcap("export", "-d", database, "-o", tmp_path / "out.jsonl")
    assert (done.returncode, done.stdout) == (0, "")
    first, second = lines(tmp_path / "out.jsonl")
    assert len(first.pop("snapshot_id")) == 32
    assert first == {
        "rollout_id": "delivered",
        "version": 1,
        "state": "frozen",
        "outcome": "delivered",
        **dict.fromkeys(("parent", "parent_token", "agent", "purpose", "cause")),
        **{"sequence": 0, "sequences": 1, "segment": 0, "multimodal": False, "continuity": None},
        "calls": 2,
        "model": "policy",
        **{"finish_reason": "stop", "truncated": False, "prompt_length": 2, "sampling": None, "log_probs_mode": None},
        "turn_spans": [
            {"start": 2, "end": 4, "model_call_id": "one", "response_id": None, "model": "policy"},
            {"start": 5, "end": 6, "model_call_id": "two", "response_id": None, "model": "policy"},
        ],
        "weight_versions": [{"start": 2, "end": 4, "version": "w1"}, {"start": 5, "end": 6, "version": "w2"}],
        "created_at": EPOCH,
        "sampled_tokens": 3,
        "token_ids": [1, 2, 3, 4, 5, 6],
        "loss_mask": [0, 0, 1, 1, 0, 1],
        "log_probs": [0.0, 0.0, -0.1, -1.1, 0.0, -0.1],
    }
    assert (second["rollout_id"], second["outcome"], second["calls"]) == ("frozen", None, 2)
    assert second["token_ids"] == [7, 8, 10, 11]


def test_what_is_left_out_is_said_with_its_reason(tokcap: RunTokcap, database: Path, tmp_path: Path) -> None:
    said = tokcap("export", "-d", database, "-o", tmp_path / "out.jsonl").stderr
    assert said.splitlines() == [
        "tokcap: exported 2 rollouts: 10 tokens, 5 of them sampled",
        "tokcap:      1 left out, masked: capture_incomplete",
        "tokcap:      1 left out, masked: multiple_roots",
        "tokcap:      1 left out, not frozen: --include-open exports them as they are",
    ]
    counts = json.loads(tokcap("export", "-d", database, "-o", tmp_path / "again.jsonl", "--json").stdout)
    assert counts["masked"] == {"capture_incomplete": 1, "multiple_roots": 1}
    assert (counts["rows"], counts["tokens"], counts["open_rollouts"]) == (2, 10, 1)


@pytest.mark.parametrize("options", [[], ["--include-open"], ["--per-request", "--include-open"]])
def test_nothing_in_the_database_changes(tokcap: RunTokcap, database: Path, tmp_path: Path, options: list[str]) -> None:
    before = content(database)
    assert tokcap("export", "-d", database, "-o", tmp_path / "out.jsonl", *options).returncode == 0
    assert content(database) == before


def test_open_rollouts_are_taken_on_request_and_stay_open(tokcap: RunTokcap, database: Path, tmp_path: Path) -> None:
    tokcap("export", "-d", database, "-o", tmp_path / "out.jsonl", "--include-open")
    [row] = [row for row in lines(tmp_path / "out.jsonl") if row["rollout_id"] == "open"]
    assert (row["state"], row["snapshot_id"], row["token_ids"]) == ("open", None, [20, 21, 22])
    assert json.loads(tokcap("show", "open", "-d", database, "--json").stdout)["summary"]["state"] == "open"


def test_per_request_makes_a_row_of_each_call_of_masked_rollouts_too(
    tokcap: RunTokcap, database: Path, tmp_path: Path
) -> None:
    tokcap("export", "-d", database, "-o", tmp_path / "out.jsonl", "--per-request")
    rows = {(row["rollout_id"], row["model_call_id"]): row for row in lines(tmp_path / "out.jsonl")}
    assert sorted(rows) == [
        *(("delivered", "one"), ("delivered", "two"), ("frozen", "a"), ("frozen", "b"), ("frozen", "c")),
        *(("marked", "only"), ("two-roots", "x"), ("two-roots", "y")),
    ]
    call = rows["delivered", "two"]
    assert call["token_ids"] == [1, 2, 3, 4, 5, 6]
    assert call["loss_mask"] == [0, 0, 0, 0, 0, 1]
    assert call["log_probs"] == [0.0, 0.0, 0.0, 0.0, 0.0, -0.1]
    assert (call["prompt_length"], call["generation_length"], call["weight_version"]) == (5, 1, "w2")
    assert (call["incomplete"], rows["marked", "only"]["incomplete"]) == (False, True)
    assert rows["two-roots", "x"]["outcome"] == "masked"


@pytest.mark.parametrize("options", [[], ["--per-request"]])
def test_parquet_and_json_lines_hold_the_same_and_pandas_reads_both(
    tokcap: RunTokcap, database: Path, tmp_path: Path, options: list[str]
) -> None:
    for name in ("out.jsonl", "out.parquet"):
        assert tokcap("export", "-d", database, "-o", tmp_path / name, *options).returncode == 0
    from_json = pandas.read_json(tmp_path / "out.jsonl", lines=True, dtype=False)
    from_parquet = pandas.read_parquet(tmp_path / "out.parquet")
    assert list(from_json.columns) == list(from_parquet.columns)
    for column in from_json.columns:
        assert [plain(value) for value in from_json[column]] == [plain(value) for value in from_parquet[column]]
    assert parquet.read_table(tmp_path / "out.parquet").to_pylist() == lines(tmp_path / "out.jsonl")
    assert from_parquet["token_ids"][0].dtype == "int32"


def plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [dict(one) for one in value]
    return None if not isinstance(value, list) and pandas.isna(value) else value


def zstandard_lines(path: Path) -> IO[bytes]:
    return io.BytesIO(pyarrow.input_stream(str(path), compression="zstd").read())


def write_records(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_fields_of_the_rollout_records_become_columns(tokcap: RunTokcap, database: Path, tmp_path: Path) -> None:
    records = write_records(
        tmp_path / "rollouts.jsonl",
        {"_ng_rollout_id": "frozen", "reward": 1, "task": "sum", "info": {"seed": 7, "tags": ["a"]}},
        {"_ng_rollout_id": "gone", "reward": 0.25, "task": "sum", "info": {"seed": 8, "tags": {}}},
    )
    options = ["--records", records, "--fields", "reward,task, info.seed,info.tags"]
    done = tokcap("export", "-d", database, "-o", tmp_path / "out.jsonl", *options)
    assert done.returncode == 1
    said = done.stderr.splitlines()
    assert "tokcap:      3 left out, without a record" in said
    assert "tokcap: no rollout 'gone' is in this database: check the id and --database" in said
    rows = {row["rollout_id"]: row for row in lines(tmp_path / "out.jsonl")}
    names = ("reward", "task", "info.seed", "info.tags")
    assert [rows["frozen"][name] for name in names] == [1, "sum", 7, ["a"]]
    assert list(rows) == ["frozen"]

    tokcap("export", "-d", database, "-o", tmp_path / "out.parquet", *options)
    table = parquet.read_table(tmp_path / "out.parquet")
    assert [str(table.schema.field(name).type) for name in names] == ["double", "string", "int64", "string"]
    assert table.column("info.tags").to_pylist() == ['["a"]']


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ('{"_ng_rollout_id": "frozen"}\n', ["--fields", "reward"], "no record in {records} has a field 'reward'"),
        ('{"reward": 1}\n', ["--fields", "reward"], "{records} line 1: no rollout id"),
        ('{"reward": \n', ["--fields", "reward"], "{records} line 1: not JSON"),
        (2 * '{"_ng_rollout_id": "r", "reward": 1}\n', ["--fields", "reward"], "line 2: there are two records"),
        ('{"_ng_rollout_id": "r", "reward": 1}\n', ["--fields", "model"], "model is a column of the export itself"),
        (f'{{"_ng_rollout_id": "r", "reward": {2**70}}}\n', ["--fields", "reward"], "line 1: a field of rollout 'r'"),
    ],
)
def test_records_that_cannot_be_used_stop_the_export_before_it_begins(
    tokcap: RunTokcap, database: Path, tmp_path: Path, text: str, options: list[str], said: str
) -> None:
    records, out = tmp_path / "rollouts.jsonl", tmp_path / "out.jsonl"
    records.write_text(text)
    refused = tokcap("export", "-d", database, "-o", out, "--records", records, *options)
    assert refused.returncode == 2
    assert said.format(records=records) in one_line(refused.stderr)
    assert os.listdir(tmp_path) == ["rollouts.jsonl"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-o", "rows.csv"], "--file-format is needed"),
        (["-o", "-", "--json"], "rows and --json cannot both go to standard output"),
        (["-o", "-", "--shard-rows", "2"], "standard output is one stream"),
        (["-o", "rows.jsonl", "--fields", "reward"], "--fields needs --records"),
        (["-o", "rows.txt.gz"], "--file-format is needed"),
        (["-o", "rows.gz", "--format", "parquet"], "rows.gz would be compressed twice"),
        (["-o", "rows.jsonl", "../x"], "invalid rollout id"),
        (["-o", "rows.jsonl", "--since", "then"], "--since: 'then' is neither an age"),
        (["-o", "there.jsonl"], "there.jsonl is there already and is not replaced"),
        (["-o", "nowhere/out.jsonl"], "cannot write nowhere/out.jsonl: No such file or directory"),
        (["-o", "rows.jsonl", "--records", "none.jsonl", "--fields", "reward"], "cannot read none.jsonl: No such file"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    tokcap: RunTokcap, database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.jsonl").write_text("mine")
    refused = tokcap("export", "-d", database, *options)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert said in one_line(refused.stderr)
    assert os.listdir() == ["there.jsonl"]
    assert Path("there.jsonl").read_text() == "mine"


def one_line(text: str) -> str:
    assert text.count("\n") == 1, text
    return text.strip()


def test_without_pyarrow_one_line_says_what_to_install(database: Path, tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['pyarrow'] = None; "
        f"sys.argv = ['tokcap', 'export', '-d', {str(database)!r}, '-o', {str(tmp_path / 'out.parquet')!r}]; "
        "from token_id_capture.cli.main import main; main()"
    )
    refused = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "pip install 'token-id-capture[parquet]'" in one_line(refused.stderr)
    assert os.listdir(tmp_path) == []


def test_a_damaged_rollout_is_named_and_left_out(tokcap: RunTokcap, tmp_path: Path) -> None:
    asyncio.run(fill(tmp_path / "captures.db"))
    with contextlib.closing(sqlite3.connect(tmp_path / "captures.db")) as connection:
        connection.execute("DROP TRIGGER snapshot_entries_immutable")
        connection.execute("UPDATE snapshot_entries SET generation = x'01000000' WHERE model_call_id = 'two'")
        connection.commit()
    done = tokcap("export", "-d", tmp_path / "captures.db", "-o", tmp_path / "out.jsonl")
    assert done.returncode == 1
    assert "call 'two' of rollout 'delivered' is damaged" in done.stderr.splitlines()[-1]
    assert [row["rollout_id"] for row in lines(tmp_path / "out.jsonl")] == ["frozen"]


def test_several_processes_write_what_one_writes(
    tokcap: RunTokcap, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    database = tmp_path / "captures.db"
    database.write_bytes(database_with(400, tmp_path_factory).read_bytes())
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute("DROP TRIGGER snapshot_entries_immutable")
        damage = "UPDATE snapshot_entries SET generation = zeroblob(length(generation)) WHERE rowid % 100 = 7"
        connection.execute(damage)
        connection.commit()
    one, two = (
        tokcap("export", "-d", database, "-o", tmp_path / f"{jobs}.jsonl", "--jobs", jobs, "--json") for jobs in (1, 2)
    )
    assert (one.returncode, one.stdout, one.stderr) == (two.returncode, two.stdout, two.stderr)
    assert one.returncode == 1
    assert (tmp_path / "1.jsonl").read_bytes() == (tmp_path / "2.jsonl").read_bytes() != b""


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_an_export_without_a_row_leaves_no_file_in_the_way_of_the_next(
    tokcap: RunTokcap, tmp_path: Path, name: str
) -> None:
    async def one_open() -> Path:
        async with TokenCaptureStore(tmp_path / "captures.db") as store:
            await store.put(entry("open", "only", [1], [2]))
            return store.database

    database = asyncio.run(one_open())
    nothing = tokcap("export", "-d", database, "-o", tmp_path / name)
    assert (nothing.returncode, nothing.stdout) == (1, "")
    assert "there is no row to export, so no file was written" in nothing.stderr
    assert "1 left out, not frozen" in nothing.stderr
    assert [path for path in tmp_path.iterdir() if path.name.startswith(("rows", ".rows"))] == []
    assert tokcap("export", "-d", database, "-o", tmp_path / name, "--include-open").returncode == 0


def test_only_the_rollouts_that_are_named_are_exported(tokcap: RunTokcap, database: Path, tmp_path: Path) -> None:
    done = tokcap("export", "frozen", "-d", database, "-o", tmp_path / "one.jsonl")
    assert (done.returncode, [row["rollout_id"] for row in lines(tmp_path / "one.jsonl")]) == (0, ["frozen"])
    done = tokcap("export", "frozen", "nobody", "-d", database, "-o", tmp_path / "two.jsonl")
    assert (done.returncode, [row["rollout_id"] for row in lines(tmp_path / "two.jsonl")]) == (1, ["frozen"])
    assert "no rollout 'nobody' is in this database" in done.stderr


def test_only_rollouts_that_have_a_record_and_were_opened_since_are_exported(
    tokcap: RunTokcap, database: Path, tmp_path: Path
) -> None:
    records = write_records(tmp_path / "rollouts.jsonl", {"_ng_rollout_id": "delivered"})
    done = tokcap("export", "delivered", "-d", database, "-o", "-", "--records", records, "--since", "1h")
    assert (done.returncode, [json.loads(row)["rollout_id"] for row in done.stdout.splitlines()]) == (0, ["delivered"])
    later = tokcap("export", "-d", database, "-o", tmp_path / "none.jsonl", "--since", "2999-01-01")
    assert (later.returncode, (tmp_path / "none.jsonl").exists()) == (1, False)


@pytest.mark.parametrize(("name", "opened"), [("rows.jsonl.gz", gzip.open), ("rows.jsonl.zst", zstandard_lines)])
def test_rows_are_compressed_as_the_name_says(
    tokcap: RunTokcap, database: Path, tmp_path: Path, name: str, opened: Callable[[Path], IO[bytes]]
) -> None:
    plain = tokcap("export", "-d", database, "-o", "-")
    assert tokcap("export", "-d", database, "-o", tmp_path / name).returncode == 0
    with opened(tmp_path / name) as written:
        assert written.read().decode() == plain.stdout
    if name.endswith(".gz"):  # of Zstandard, pandas needs another library
        assert len(pandas.read_json(tmp_path / name, lines=True)) == len(plain.stdout.splitlines())
