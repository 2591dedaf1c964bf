"""``tokcap show``: the tree of the calls, for people and for programs, and what is shown when there is none."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
from pathlib import Path

import pytest

from support.commands import RunInstalled, RunTokcap, clean_environment
from support.many_rollouts import database_with
from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore


def entry(call: str, prompt: list[int], generation: list[int], created_at: float = 1.0) -> TokenEntry:
    return TokenEntry(
        rollout_id="r",
        model_call_id=call,
        model="policy",
        prompt_token_ids=prompt,
        generation_token_ids=generation,
        generation_log_probs=[-0.5] * len(generation),
        created_at=created_at,
    )


CALLS = (
    entry("root", [1, 2], [3]),
    entry("kept", [1, 2, 3, 4], [5]),
    entry("retry", [1, 2, 3, 4], [6]),
    entry("last", [1, 2, 3, 4, 5, 7], [8]),
    entry("agent", [9, 9], [9], created_at=2.0),
    entry("empty", [1, 2, 3, 4], []),
)


async def fill(store: TokenCaptureStore) -> None:
    for call in CALLS:
        await store.put(call)


def tree_of(text: str) -> list[str]:
    lines = text.splitlines()
    start = lines.index("tree") + 1
    return lines[start : lines.index("", start)]


DRAWN = [
    "┌ 1",
    "├── 3  another answer to the prompt of 2; left out",
    "└ 2, 4  main sequence, 7 tokens",
    "─ 5  starts anew; differs from 1 at position 0",
    "6  nothing generated; left out",
]


@pytest.mark.parametrize("frozen", [False, True])
async def test_the_tree_is_drawn_for_open_and_frozen_rollouts(tokcap: RunTokcap, tmp_path: Path, frozen: bool) -> None:
    async with TokenCaptureStore(tmp_path) as store:
        await fill(store)
        if frozen:
            await store.freeze("r")
        shown = tokcap("show", "r", "-d", tmp_path)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert tree_of(shown.stdout) == DRAWN
        assert (await store.describe_rollout("r")).summary.state == ("frozen" if frozen else "open")


async def test_programs_get_the_place_of_each_call(tokcap: RunTokcap, tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path) as store:
        await fill(store)
    shown = json.loads(tokcap("show", "r", "-d", tmp_path, "--json").stdout)
    assert shown["summary"]["calls"] == len(CALLS)
    assert [(row["model_call_id"], row["role"], row["continues"]) for row in shown["tree"]] == [
        ("root", "main", None),
        ("kept", "main", "root"),
        ("retry", "retry", "root"),
        ("last", "main", "kept"),
        ("agent", "branch", None),
        ("empty", "empty", None),
    ]
    retry, agent = shown["tree"][2], shown["tree"][4]
    assert (retry["same_prompt_as"], retry["shared"]) == ("kept", 3)
    assert (agent["departs_from"], agent["departs_at"]) == ("root", 0)


async def test_output_without_box_characters_gets_plain_ones(run_installed: RunInstalled, tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path) as store:
        await fill(store)
    environment = {**clean_environment(), "PYTHONIOENCODING": "ascii"}
    shown = run_installed("show", "r", "-d", tmp_path, env=environment, capture_output=True)
    assert (shown.returncode, shown.stderr) == (0, b"")
    assert tree_of(shown.stdout.decode())[:2] == ["+ 1", "+-- 3  another answer to the prompt of 2; left out"]


async def test_a_damaged_rollout_is_shown_without_its_tree(tokcap: RunTokcap, tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path) as store:
        await fill(store)
    with contextlib.closing(sqlite3.connect(store.database)) as connection, connection:
        connection.execute("UPDATE entries SET generation = x'09000000' WHERE model_call_id = 'kept'")
    shown = tokcap("show", "r", "-d", tmp_path)
    assert shown.returncode == 0
    assert shown.stderr.startswith("tokcap: there is no tree of the calls: call 'kept' of rollout 'r' is damaged")
    assert "\ncalls\n" in shown.stdout
    assert "\ntree\n" not in shown.stdout
    assert json.loads(tokcap("show", "r", "-d", tmp_path, "--json").stdout)["tree"] is None


async def test_a_retired_rollout_has_no_tree(tokcap: RunTokcap, tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path) as store:
        await fill(store)
        await store.retire(["r"])
    shown = tokcap("show", "r", "-d", tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "tree" not in shown.stdout


def test_a_long_rollout_among_many_has_a_short_tree(
    tokcap: RunTokcap, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shown = tokcap("show", "zz-long", "-d", database_with(4_000, tmp_path_factory))
    assert tree_of(shown.stdout) == [
        "─ 1-100  main sequence, 100,000 tokens",
        "─ 101  starts anew; differs from 1 at position 5",
    ]


def test_a_reader_that_leaves_early_gets_no_complaint(
    run_installed: RunInstalled, tmp_path_factory: pytest.TempPathFactory
) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        path = database_with(4_000, tmp_path_factory)
        left = run_installed("show", "zz-long", "-d", path, stdout=write, stderr=subprocess.PIPE)
    finally:
        os.close(write)
    assert (left.returncode, left.stderr) == (1, b"")
