"""``tokcap ls``, ``tokcap show``, and how the command behaves at its edges: the real command, a real file."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sqlite3
import subprocess
from pathlib import Path

import pytest

from support.commands import TOKCAP, RunInstalled, RunTokcap
from support.terminal import on_terminal
from token_id_capture.consumer import trajectories_from_source
from token_id_capture.delivery import record_delivery, retire_rollout_token_capture
from token_id_capture.errors import RolloutFrozenError
from token_id_capture.lifecycle import CallOrigin
from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore
from token_id_capture.store.file.connections import create_file


def entry(rollout_id: str, call: str, prompt: list[int], generation: list[int]) -> TokenEntry:
    return TokenEntry(
        rollout_id=rollout_id,
        model_call_id=call,
        model="policy",
        prompt_token_ids=prompt,
        generation_token_ids=generation,
        generation_log_probs=[-0.5] * len(generation),
        finish_reason="stop",
        created_at=1.75e9,
    )


async def fill(path: Path) -> None:
    async with TokenCaptureStore(path) as store:
        await store.put(entry("math-0", "first", [1, 2, 3], [4, 5]))
        await store.put(entry("math-0", "second", [1, 2, 3, 4, 5, 6], [7]))
        snapshot = await store.freeze("math-0")
        await store.record_outcome(snapshot.snapshot_id, snapshot.version, "delivered")
        with contextlib.suppress(RolloutFrozenError):
            await store.put(entry("math-0", "too-late", [1], [2]))
        await store.begin_call("math-1", "lost")
        await store.mark_incomplete("math-1", "lost", "token_count_mismatch: 5 token ids, 12 completion tokens")
        await store.put(entry("other", "only", [1], [2]))


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``math-0``: two calls, frozen, delivered, a late write. ``math-1``: a lost call. ``other``: open."""
    path = tmp_path_factory.mktemp("database") / "captures.db"
    asyncio.run(fill(path))
    return path


def test_ls_shows_one_rollout_a_line(tokcap: RunTokcap, database: Path) -> None:
    shown = tokcap("ls", "--database", database)
    assert shown.returncode == 0, shown.stderr
    assert shown.stderr == ""
    header, *rows = [line.split() for line in shown.stdout.splitlines()]
    assert " ".join(header) == "rollout state calls agents prompt sampled flags outcome"
    assert rows == [
        ["math-0", "frozen", "2", "1", "6", "3", "0", "delivered"],
        ["math-1", "open", "0", "0", "0", "0", "1+1", "-"],
        ["other", "open", "1", "1", "1", "1", "0", "-"],
    ]


def test_ls_prints_json_for_programs(tokcap: RunTokcap, database: Path) -> None:
    rollouts = json.loads(tokcap("ls", "--database", database, "--json").stdout)
    assert [rollout["rollout_id"] for rollout in rollouts] == ["math-0", "math-1", "other"]
    assert rollouts[0]["generated_tokens"] == 3
    assert rollouts[1]["open_intents"] == 1


def test_ls_goes_through_a_long_list_page_by_page(tokcap: RunTokcap, database: Path) -> None:
    assert len(json.loads(tokcap("ls", "-d", database, "--json", "--limit", 10**30).stdout)) == 3
    first = tokcap("ls", "-d", database, "--json", "--limit", 2)
    assert [rollout["rollout_id"] for rollout in json.loads(first.stdout)] == ["math-0", "math-1"]
    assert first.stderr == "tokcap: there are more; continue with --after math-1\n"
    rest = tokcap("ls", "-d", database, "--json", "--limit", 2, "--after", "math-1")
    assert [rollout["rollout_id"] for rollout in json.loads(rest.stdout)] == ["other"]
    assert rest.stderr == ""


def test_ls_of_an_empty_database_shows_its_header(tokcap: RunTokcap, tmp_path: Path) -> None:
    make_empty(tmp_path)
    shown = tokcap("ls", "-d", tmp_path)
    assert (shown.returncode, len(shown.stdout.splitlines())) == (0, 1)
    assert json.loads(tokcap("ls", "-d", tmp_path, "--json").stdout) == []


def make_empty(directory: Path) -> Path:
    async def create() -> Path:
        async with TokenCaptureStore(directory) as store:
            return store.database

    return asyncio.run(create())


def test_the_database_may_come_from_the_environment(tokcap: RunTokcap, database: Path) -> None:
    assert tokcap("ls", env={"TOKCAP_DATABASE": str(database)}).stdout.startswith("rollout ")


def test_the_database_may_be_a_url(tokcap: RunTokcap, database: Path) -> None:
    relative = os.path.relpath(database)
    for url in (f"sqlite:///{database}", f"sqlite+aiosqlite:///{database}?cache=shared", f"sqlite:///{relative}"):
        for command in (["ls"], ["show", "math-0"], ["sql", "SELECT * FROM late_calls"]):
            named, by_path = (tokcap(*command, "-d", where).stdout for where in (url, database))
            assert named == by_path != ""
    for url in ("mysql://host/captures", "sqlite:///:memory:", "sqlite://"):
        refused = tokcap("ls", "-d", url)
        assert refused.returncode == 2
        assert "name a path, or an SQLite URL" in one_line(refused.stderr)


def test_show_says_which_call_continues_which(tokcap: RunTokcap, database: Path) -> None:
    shown = tokcap("show", "math-0", "--database", database)
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0] == "rollout math-0: frozen, version 1"
    calls = lines[lines.index("calls") + 2 : lines.index("tree") - 1]
    assert [line.split()[:10] for line in calls] == [
        ["1", "-", "0", "3", "2", "first", "-", "-", "policy", "stop"],
        ["2", "1", "5", "6", "1", "second", "-", "-", "policy", "stop"],
    ]
    assert lines[lines.index("outcomes") + 2].split()[:2] == ["1", "delivered"]
    assert lines[lines.index("late writes") + 2].split()[:2] == ["too-late", "frozen"]


def test_show_names_what_is_missing_and_the_process_that_lost_it(tokcap: RunTokcap, database: Path) -> None:
    detail = json.loads(tokcap("show", "math-1", "-d", database, "--json").stdout)
    assert [(flag["reason"], flag["detail"]) for flag in detail["flags"]] == [
        ("token_count_mismatch", "5 token ids, 12 completion tokens")
    ]
    assert [(intent["model_call_id"], intent["outcome"]) for intent in detail["intents"]] == [("lost", None)]
    text = tokcap("show", "math-1", "-d", database).stdout
    assert "still open" in text
    assert f" {os.getpid()} " in text


async def test_ls_and_show_tell_whose_calls_they_are(tokcap: RunTokcap, tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path) as store:
        await store.put(made_up_call("r", "first", agent="main", purpose="turn"))
        await store.put(made_up_call("r", "other", prompt=[7], agent="a1", parent_agent="main"))
        await store.begin_attributed_call("r", "lost", CallOrigin("a1", "main"))
    assert tokcap("ls", "-d", tmp_path).stdout.splitlines()[1].split()[3] == "2"
    shown = tokcap("show", "r", "-d", tmp_path).stdout
    assert "agent a1, of main" in shown
    lines = shown.splitlines()
    assert lines[lines.index("calls") + 2].split()[6:8] == ["main", "turn"]
    assert lines[lines.index("intents") + 2].split()[:2] == ["lost", "a1"]


def made_up_call(rollout_id: str, call: str, *, prompt: list[int] | None = None, **more: object) -> TokenEntry:
    fields = {"prompt_token_ids": prompt or [1], "generation_token_ids": [2], "generation_log_probs": [-0.5], **more}
    return TokenEntry.model_validate({"rollout_id": rollout_id, "model_call_id": call, **fields})


async def test_text_from_an_engine_cannot_steer_the_terminal(tokcap: RunTokcap, tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path) as store:
        await store.mark_incomplete("r", "call", "lost_stream: \x1b]0;owned\x07\nsecond line")
    shown = tokcap("show", "r", "-d", tmp_path).stdout
    assert "\\x1b]0;owned\\x07\\nsecond line" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize("command", [["ls"], ["show", "math-0"]])
def test_a_missing_database_is_one_line_and_is_not_made(tokcap: RunTokcap, tmp_path: Path, command: list[str]) -> None:
    missing = tmp_path / "nowhere" / "captures.db"
    refused = tokcap(*command, "--database", missing)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"there is no capture database at {missing}" in one_line(refused.stderr)
    assert not missing.parent.exists()


@pytest.mark.parametrize("command", [["ls"], ["show", "math-0"]])
def test_a_file_that_is_no_database_is_one_line(tokcap: RunTokcap, tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "notes.db").write_text("These are my notes of last week, and no database at all.\n" * 100)
    refused = tokcap(*command, "-d", tmp_path / "notes.db")
    assert refused.returncode == 2
    assert "notes.db" in one_line(refused.stderr)


def test_a_newer_schema_asks_for_an_upgrade_in_one_line(tokcap: RunTokcap, tmp_path: Path) -> None:
    database = make_empty(tmp_path)
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()
    refused = tokcap("ls", "-d", database)
    assert refused.returncode == 2
    assert "upgrade" in one_line(refused.stderr).lower()


def test_a_file_whose_creation_was_cut_short_is_finished_and_an_empty_one_left_alone(
    tokcap: RunTokcap, tmp_path: Path
) -> None:
    create_file(tmp_path / "begun.db")
    shown = tokcap("ls", "-d", tmp_path / "begun.db")
    assert (shown.returncode, len(shown.stdout.splitlines()), shown.stderr) == (0, 1, "")
    (tmp_path / "empty.db").touch()
    for command in ("ls", "vacuum"):
        refused = tokcap(command, "-d", tmp_path / "empty.db")
        assert refused.returncode == 2
        assert "empty.db is an empty file: no capture was ever stored in it" in one_line(refused.stderr)
        assert (tmp_path / "empty.db").stat().st_size == 0


def test_an_unknown_rollout_is_one_line(tokcap: RunTokcap, database: Path) -> None:
    refused = tokcap("show", "math-7", "-d", database)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "'math-7'" in one_line(refused.stderr)


@pytest.mark.parametrize("rollout", ["../etc", "", "a b", "x" * 201])
def test_an_invalid_id_is_one_line(tokcap: RunTokcap, database: Path, rollout: str) -> None:
    refused = tokcap("show", rollout, "-d", database)
    assert refused.returncode == 2
    assert "invalid rollout id" in one_line(refused.stderr)


def one_line(text: str) -> str:
    assert text.count("\n") == 1, text
    assert text.startswith("tokcap: ")
    return text.strip()


@pytest.mark.parametrize("arguments", [["ls"], ["ls", "--json"], ["show", "math-0"]])
def test_a_reader_that_leaves_early_gets_no_complaint(
    run_installed: RunInstalled, database: Path, arguments: list[str]
) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        left = run_installed(*arguments, "-d", database, stdout=write, stderr=subprocess.PIPE)
    finally:
        os.close(write)
    assert left.stderr == b""
    assert left.returncode == 1


def test_a_closed_standard_output_gets_no_traceback(database: Path) -> None:
    shell = f'exec "{TOKCAP}" ls -d "{database}" >&-'
    left = subprocess.run(["sh", "-c", shell], stderr=subprocess.PIPE, timeout=60, check=False)
    assert (left.returncode, left.stderr) == (0, b"")


@pytest.mark.parametrize(("environment", "coloured"), [({"TERM": "xterm"}, True), ({"TERM": "dumb"}, False)])
def test_a_terminal_gets_colours_if_it_has_them(database: Path, environment: dict[str, str], coloured: bool) -> None:
    shown = on_terminal(120, "ls", "-d", database, **environment)
    assert ("\x1b[32mdelivered" in shown) is coloured
    assert plain(shown).startswith("rollout  state")
    assert "\x1b" not in on_terminal(120, "ls", "-d", database, NO_COLOR="1", TERM="dumb")


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


async def test_a_row_is_a_few_lines_of_an_80_column_terminal_and_nothing_is_cut(tmp_path: Path) -> None:
    ids = ["0b5c1c7e-1111-2222-3333-444455556666", "math-17-0-a1"]
    async with TokenCaptureStore(tmp_path) as store:
        for rollout_id in ids:
            await store.put(entry(rollout_id, "first", [1, 2], [3]))
            snapshot = await store.freeze(rollout_id)
            await store.record_outcome(snapshot.snapshot_id, snapshot.version, "masked", "capture_incomplete")
    header, *lines = plain(on_terminal(80, "ls", "-d", tmp_path)).splitlines()
    assert len(lines) <= 5
    assert max(map(len, (header, *lines))) <= 80
    assert lines[-2].startswith("math-17-0-a1 ")
    column = header.index("state")
    assert "".join(line[:column].strip() for line in lines) == "".join(ids)


def test_where_columns_have_no_room_each_row_is_a_block(database: Path) -> None:
    lines = plain(on_terminal(40, "ls", "-d", database)).splitlines()
    assert lines[:2] == ["rollout  math-0", "state    frozen"]
    assert max(map(len, lines)) <= 40


async def test_a_retired_rollout_shows_what_its_outcome_counted(tokcap: RunTokcap, tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path) as store:
        for name in ("counted", "uncounted"):
            await store.put(entry(name, "first", [1, 2], [3, 4, 5]))
        built = await trajectories_from_source("counted", store)
        await record_delivery(store, built)
        assert await retire_rollout_token_capture("counted", store, built)
        await store.retire(["uncounted"])
    rows = [line.split() for line in tokcap("ls", "-d", tmp_path).stdout.splitlines()[1:]]
    assert rows == [
        ["counted", "retired", "1", "-", "-", "3", "0", "delivered"],
        ["uncounted", "retired", "-", "-", "-", "-", "0", "-"],
    ]


def test_the_version_is_that_of_the_distribution(tokcap: RunTokcap) -> None:
    from importlib.metadata import version

    assert tokcap("--version").stdout == f"tokcap {version('token-id-capture')}\n"


def test_no_arguments_show_the_help(tokcap: RunTokcap) -> None:
    shown = tokcap()
    assert "Usage: tokcap" in shown.stdout + shown.stderr


def test_help_does_not_load_what_is_heavy() -> None:
    import sys

    program = (
        "import sys; from token_id_capture.cli.main import app; "
        "print(sorted({'sqlalchemy', 'alembic', 'aiohttp', 'starlette', 'uvicorn'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"


def test_an_error_shows_its_traceback_on_request(tokcap: RunTokcap, tmp_path: Path) -> None:
    refused = tokcap("ls", "-d", tmp_path / "none.db", env={"TOKCAP_DEBUG": "1"})
    assert refused.returncode == 2
    assert "Traceback (most recent call last)" in refused.stderr
    assert "UnusableDatabaseError" in refused.stderr


def test_a_usage_error_is_no_traceback(tokcap: RunTokcap) -> None:
    refused = tokcap("ls")
    assert refused.returncode == 2
    assert "--database" in refused.stderr
    assert "Traceback" not in refused.stderr
