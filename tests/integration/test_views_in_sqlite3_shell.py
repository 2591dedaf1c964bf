"""The views, asked as a person without this package asks them: in the stock sqlite3 shell.

Every column and every example of docs/views.md is checked here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.many_rollouts import database_with
from token_id_capture.consumer import trajectories_from_source
from token_id_capture.errors import RolloutFrozenError
from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore

DOCUMENT = Path(__file__).parents[2] / "docs" / "views.md"
VIEWS = ("rollout_overview", "kept_evidence", "lost_calls", "late_calls", "call_chain", "call_tokens")
TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}")

Shell = Callable[[str], list[dict[str, Any]]]


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


async def fill(store: TokenCaptureStore) -> None:
    await store.put(entry("math-0", "first", [1, 2, 3], [4, 2**32 - 1]))
    await store.put(entry("math-0", "second", [1, 2, 3, 4, 2**32 - 1, 6], [7]))
    await store.put(entry("math-0", "third", [1, 2, 3, 4, 2**32 - 1, 6, 7, 8, 9], [10]))
    await store.put(entry("math-0", "elsewhere", [1, 2, 9], [3]))
    built = await trajectories_from_source("math-0", store)
    assert built["reason"] == "multiple_roots"
    with contextlib.suppress(RolloutFrozenError):
        await store.put(entry("math-0", "too-late", [1], [2]))
    await store.put(entry("math-1", "only", [1], [2]))
    await store.begin_call("math-1", "lost")
    await store.begin_call("math-1", "refused")
    await store.refuse_call("math-1", "refused", "context too long")
    await store.mark_incomplete("math-1", "lost", "unknown_outcome: HTTP 500")
    await store.mark_incomplete("math-1", "", "store_failed")
    assert (await trajectories_from_source("math-1", store))["reason"] == "capture_incomplete"
    await store.put(entry("running", "only", [1], [2]))
    await store.put(entry("done", "only", [1], [2]))
    snapshot = await store.freeze("done")
    counted = {"n_calls": 2, "generated_tokens_captured": 7}
    await store.record_outcome(snapshot.snapshot_id, snapshot.version, "delivered", metrics=counted)
    await store.put(entry("uncounted", "only", [1], [2]))
    await store.retire(["uncounted"])
    assert await store.drop("done", snapshot_id=snapshot.snapshot_id, version=snapshot.version)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("views") / "captures.db"

    async def make() -> None:
        async with TokenCaptureStore(path) as store:
            await fill(store)

    asyncio.run(make())
    return path


def ask(path: Path, statement: str) -> list[dict[str, Any]]:
    found = shutil.which("sqlite3")
    assert found, "the sqlite3 shell is missing: apt-get install sqlite3"
    command = [found, "-readonly", "-json", "-init", os.devnull, str(path), statement]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr
    found_rows: list[dict[str, Any]] = json.loads(ran.stdout or "[]")
    return found_rows


@pytest.fixture
def shell(database: Path) -> Shell:
    return lambda statement: ask(database, statement)


def documented_columns(view: str) -> list[str]:
    section = DOCUMENT.read_text(encoding="utf-8").split(f"\n## {view}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \| \S", section, re.MULTILINE)


def examples() -> list[str]:
    blocks = re.findall(r"```sql\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    # The shell takes what begins with a dash for an option.
    bare = ["\n".join(line for line in block.splitlines() if not line.startswith("--")) for block in blocks]
    return [f"{statement.strip()};" for block in bare for statement in block.split(";") if statement.strip()]


def test_the_documented_views_are_those_of_the_file(shell: Shell) -> None:
    names = [row["name"] for row in shell("SELECT name FROM sqlite_master WHERE type = 'view' ORDER BY rowid")]
    assert sorted(names) == sorted(VIEWS)
    assert re.findall(r"^## (\w+)$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE) == list(VIEWS)


@pytest.mark.parametrize("view", VIEWS)
def test_every_column_is_documented_in_its_order(shell: Shell, view: str) -> None:
    assert documented_columns(view) == [column["name"] for column in shell(f"PRAGMA table_xinfo({view})")]


@pytest.mark.parametrize("statement", examples())
def test_every_documented_example_gives_rows(shell: Shell, statement: str) -> None:
    assert shell(statement)


def test_the_overview_sums_up_what_is_there_and_what_became_of_it(shell: Shell) -> None:
    rows = {row["rollout_id"]: row for row in shell("SELECT * FROM rollout_overview")}
    columns = ("state", "calls", "longest_prompt", "longest_sequence", "generated_tokens", "incomplete", "flags")
    assert {rollout: tuple(row[name] for name in columns) for rollout, row in rows.items()} == {
        "math-0": ("frozen", 4, 9, 10, 5, 0, 0),
        "math-1": ("frozen", 1, 1, 2, 1, 1, 2),
        "running": ("open", 1, 1, 2, 1, 0, 0),
        "done": ("retired", 2, None, None, 7, 0, 0),
        "uncounted": ("retired", None, None, None, None, 0, 0),
    }
    assert [rows[rollout]["open_calls"] for rollout in ("math-0", "math-1")] == [0, 1]
    outcomes = {rollout: (row["latest_outcome"], row["latest_reason"]) for rollout, row in rows.items()}
    assert outcomes["math-0"] == ("masked", "multiple_roots")
    assert outcomes["running"] == (None, None)
    assert outcomes["done"] == ("delivered", "")
    assert all(0 <= row["age_seconds"] < 3600 for row in rows.values())


def test_kept_evidence_says_why_with_all_particulars(shell: Shell) -> None:
    rows = {row["rollout_id"]: row for row in shell("SELECT * FROM kept_evidence")}
    assert set(rows) == {"math-0", "math-1"}
    assert rows["math-0"]["calls"] == 4
    assert rows["math-0"]["flags"] is None
    assert rows["math-0"]["all_reasons"].startswith("multiple_roots: 2 roots; turn 2 (call first) departs from")
    assert set(rows["math-1"]["flags"].split("; ")) == {
        "unknown_outcome (call lost): HTTP 500",
        "store_failed",
        f"call_lost (call lost): begun by process {os.getpid()} on {os.uname().nodename}",
    }


async def test_evidence_that_was_released_is_no_longer_listed(tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path) as store:
        await fill(store)
        assert len(ask(store.database, "SELECT * FROM kept_evidence")) == 2
        await store.mark_incomplete("math-0", "elsewhere", "id_mismatch")
        await store.freeze("math-0")
        versions = ask(store.database, "SELECT version, judged_version FROM kept_evidence WHERE rollout_id = 'math-0'")
        assert [(row["version"], row["judged_version"]) for row in versions] == [(1, 1), (2, 1)]
        await store.retire(["math-0"])
        assert [row["rollout_id"] for row in ask(store.database, "SELECT * FROM kept_evidence")] == ["math-1"]


def test_a_lost_call_names_its_process_and_a_refused_one_is_not_lost(shell: Shell) -> None:
    (lost,) = shell("SELECT * FROM lost_calls")
    assert (lost["rollout_id"], lost["model_call_id"], lost["rollout_state"]) == ("math-1", "lost", "frozen")
    assert (lost["pid"], lost["host"]) == (os.getpid(), os.uname().nodename)
    assert lost["flags"] == "unknown_outcome: HTTP 500"


def test_a_late_call_says_what_refused_it_and_how_late_it_was(shell: Shell) -> None:
    (late,) = shell("SELECT * FROM late_calls")
    assert (late["rollout_id"], late["model_call_id"], late["refused_as"]) == ("math-0", "too-late", "frozen")
    assert late["pid"] == os.getpid()
    assert 0 <= late["seconds_after_freeze"] < 60


def test_the_chain_has_the_turn_of_each_call_and_what_it_shares(shell: Shell) -> None:
    rows = shell("SELECT * FROM call_chain WHERE rollout_id = 'math-0'")
    columns = ("turn", "parent_call_id", "shared_tokens", "shared_fraction", "new_prompt_tokens")
    assert {row["model_call_id"]: tuple(row[name] for name in columns) for row in rows} == {
        "first": (1, None, 0, 0.0, 3),
        "second": (2, "first", 5, 0.8333, 1),
        "third": (3, "second", 7, 0.7778, 2),
        "elsewhere": (1, None, 0, 0.0, 3),
    }


@pytest.mark.parametrize(
    ("view", "times"),
    [
        ("rollout_overview", ["opened"]),
        ("kept_evidence", ["frozen", "judged"]),
        ("lost_calls", ["begun", "process_started", "process_last_seen"]),
        ("late_calls", ["attempted", "process_started", "process_last_seen"]),
        ("call_chain", ["created", "stored"]),
    ],
)
def test_times_have_microseconds_and_sort_as_text(shell: Shell, view: str, times: list[str]) -> None:
    for row in shell(f"SELECT * FROM {view}"):
        assert [name for name in times if not TIME.fullmatch(row[name])] == []
        assert sorted(name for name in row if TIME.fullmatch(str(row[name]))) == sorted(times)


async def test_a_time_is_rounded_to_microseconds_and_never_to_sixty_seconds(tmp_path: Path) -> None:
    made = {"a": 1_749_999_999.9999998, "b": 1_749_999_999.999999, "c": 0.0, "d": 1_764_547_199.123457}
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        for name, created in made.items():
            await store.put(entry("r", name, [1], [2]).model_copy(update={"created_at": created}))
        rows = ask(store.database, "SELECT model_call_id, created FROM call_chain ORDER BY model_call_id")
    assert [row["created"] for row in rows] == [
        "2025-06-15 15:06:40.000000",
        "2025-06-15 15:06:39.999999",
        "1970-01-01 00:00:00.000000",
        "2025-11-30 23:59:59.123457",
    ]


def test_calls_with_several_roots_and_one_time_have_an_order(shell: Shell) -> None:
    rows = shell("SELECT * FROM call_chain WHERE rollout_id = 'math-0' ORDER BY stored_order")
    assert {row["created"] for row in rows} == {"2025-06-15 15:06:40.000000"}
    assert [(row["model_call_id"], row["root_call_id"]) for row in rows] == [
        ("first", "first"),
        ("second", "first"),
        ("third", "first"),
        ("elsewhere", "elsewhere"),
    ]


def test_the_documented_recipe_decodes_the_whole_sequence_of_a_call(shell: Shell) -> None:
    statement = next(example for example in examples() if example.startswith("WITH RECURSIVE"))
    rows = shell(statement.replace("'second'", "'third'"))
    assert [row["position"] for row in rows] == list(range(10))
    assert [row["token_id"] for row in rows] == [1, 2, 3, 4, 2**32 - 1, 6, 7, 8, 9, 10]
    assert [row["part"] for row in rows if row["model_call_id"] == "first"] == ["prompt"] * 3 + ["generation"] * 2


# What may be scanned whole: it is small, or holds only rows of the one rollout that is asked for.
SMALL = re.compile(r"SCAN (a|b|above|j|CONSTANT ROW|\d+ CONSTANT ROWS?|\(subquery-\d+\))( |$)")


@pytest.mark.parametrize("view", VIEWS)
def test_a_condition_on_one_rollout_is_answered_from_its_rows(database: Path, view: str) -> None:
    statement = f"EXPLAIN QUERY PLAN SELECT * FROM {view} WHERE rollout_id = 'math-0'"
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        steps = [row[3] for row in connection.execute(statement)]
    assert [step for step in steps if step.startswith("SCAN") and not SMALL.match(step)] == []


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same mixture of rollouts, a few hundred and ten times as many."""
    return database_with(400, tmp_path_factory), database_with(4_000, tmp_path_factory)


def thousands_of_instructions(path: Path, statement: str) -> int:
    """How much SQLite's machine works for a statement: unlike seconds, that is the same on every machine."""
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        ticks += 1

    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        connection.execute("SELECT count(*) FROM sqlite_master")
        connection.set_progress_handler(tick, 1_000)
        rows = connection.execute(statement).fetchall()
    assert rows
    return ticks


@pytest.mark.parametrize("view", VIEWS)
def test_the_first_rows_of_a_view_cost_the_same_in_a_large_file(sizes: tuple[Path, Path], view: str) -> None:
    few, many = (thousands_of_instructions(path, f"SELECT * FROM {view} LIMIT 20") for path in sizes)
    assert many <= few + 2
    assert many < 200


@pytest.mark.parametrize("view", VIEWS)
def test_one_rollout_costs_the_same_in_a_large_file(sizes: tuple[Path, Path], view: str) -> None:
    rollout = {"late_calls": "rollout-0000014", "lost_calls": "rollout-0000019"}.get(view, "rollout-0000015")
    statement = f"SELECT * FROM {view} WHERE rollout_id = '{rollout}'"
    few, many = (thousands_of_instructions(path, statement) for path in sizes)
    assert many <= few + 2
    assert many < 200
