"""``--sequences`` and ``--models`` of ``tokcap finalize`` and ``tokcap export``: real files, real processes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from support.call_trees import call
from support.commands import RunTokcap
from support.finalizing import Bench, record
from token_id_capture.lifecycle import CallOrigin
from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore

SAMPLED = 9


def tree(rollout_id: str) -> list[TokenEntry]:
    """A title, two turns, an answer that came back as other tokens, and a sub-agent: nine sampled tokens."""
    kept: dict[str, Any] = {"rollout_id": rollout_id, "model": "policy"}
    main = {**kept, "agent": "main", "offers_tools": True}
    answer, other = [10, 11, 12], [10, 99, 98, 12, 5]
    return [
        call("title", [90, 91], [92], created_at=0.5, **{**main, "offers_tools": False}),
        call("first", [1, 2, 3], answer, created_at=1.0, **main),
        call("sub", [50, 51], [52, 53], created_at=1.5, **kept, agent="explore", parent_agent="main"),
        call("second", [1, 2, 3, *other], [20], created_at=2.0, **main),
        call("third", [1, 2, 3, *other, 20, 6], [21, 22], created_at=3.0, response_id="scored", **main),
    ]


@pytest.fixture
def bench(tmp_path: Path, tokcap: RunTokcap) -> Bench:
    return Bench(tmp_path, tokcap)


def capture(bench: Bench, tasks: range, lost: CallOrigin | None = None) -> None:
    async def put() -> None:
        async with TokenCaptureStore(bench.database) as store:
            for task in tasks:
                for entry in tree(f"{task}-0"):
                    await store.put(entry)
                if lost is not None:
                    await store.begin_attributed_call(f"{task}-0", "lost", lost)

    asyncio.run(put())
    bench.write(*(scored(task) for task in tasks))


def scored(task: int) -> dict[str, Any]:
    given = record(task)
    return {**given, "response": {**given["response"], "id": "scored"}}


def test_every_sequence_is_a_row_and_every_sampled_token_has_loss_once(bench: Bench) -> None:
    capture(bench, range(2))
    done = bench.finalize("--format", "trajectory", "--sequences", "all", "--retire")
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "tokcap: 8 rows of 2 rollouts written, 0 of the rollouts masked, 2 retired",
        "tokcap:      2 began anew: retokenization",
        "tokcap:      2 began anew: auxiliary",
        "tokcap:      2 began anew: sub_agent",
    ]
    rows = bench.rows()
    assert [row["rollout_id"] for row in rows] == ["0-0"] * 4 + ["1-0"] * 4
    assert [(row["sequence"], row["sequences"]) for row in rows[:4]] == [(n, 4) for n in range(4)]
    assert sum(sum(row["loss_mask"]) for row in rows[:4]) == SAMPLED
    assert [(row["agent"], row["cause"]) for row in rows[:4]] == [
        ("main", "retokenization"),
        ("main", "auxiliary"),
        ("main", None),
        ("explore", "sub_agent"),
    ]
    assert rows[0]["token_ids"] == [1, 2, 3, 10, 99, 98, 12, 5, 20, 6, 21, 22]
    assert (rows[0]["parent"], rows[0]["parent_token"]) == (2, 4)


def test_the_main_row_is_the_first_of_all_rows(bench: Bench) -> None:
    capture(bench, range(1))
    bench.finalize("--format", "trajectory", "--sequences", "all")
    first = bench.rows()[0]
    bench.output.unlink()
    bench.finalize("--format", "trajectory")
    [main] = bench.rows()
    assert {name: main[name] for name in ("token_ids", "loss_mask", "log_probs")} == {
        name: first[name] for name in ("token_ids", "loss_mask", "log_probs")
    }


def test_records_of_all_sequences_carry_each_token_array_once(bench: Bench) -> None:
    capture(bench, range(1))
    bench.finalize("--sequences", "all")
    rows = bench.rows()
    items = [item for row in rows for item in row["response"]["output"] if "generation_token_ids" in item]
    assert sum(len(item["generation_token_ids"]) for item in items) == SAMPLED
    assert [row["_ng_token_capture"]["sequence"] for row in rows] == [0, 1, 2, 3]
    assert bench.summary("--sequences", "all")["already_there"] == 1


@pytest.mark.parametrize("row_format", ["record", "trajectory"])
def test_a_rollout_of_which_rows_are_missing_is_written_again_as_a_whole(bench: Bench, row_format: str) -> None:
    capture(bench, range(3))
    options = ["--format", row_format, "--sequences", "all"]
    bench.finalize(*options)
    whole = bench.output.read_bytes().splitlines(keepends=True)
    for kept in (9, 10, 11):
        for torn in (b"", whole[kept][: len(whole[kept]) // 2]):
            bench.output.write_bytes(b"".join(whole[:kept]) + torn)
            assert bench.summary(*options)["already_there"] == 2
            assert bench.output.read_bytes().splitlines(keepends=True) == whole
    bench.output.write_bytes(b"".join([*whole[:2], *whole[4:]]))
    refused = bench.finalize(*options)
    assert refused.returncode == 2
    assert "line 3: rows of rollout '0-0' are missing before it" in refused.stderr


def test_a_lost_call_masks_the_rows_of_its_own_agent(bench: Bench) -> None:
    capture(bench, range(1), CallOrigin("explore", "main"))
    summary = bench.summary("--format", "trajectory", "--sequences", "all")
    assert (summary["written"], summary["masked"], summary["rows"]) == (1, 0, 4)
    rows = bench.rows()
    assert [row["mask_reason"] for row in rows] == [None, None, None, "capture_incomplete"]
    assert rows[3]["token_ids"] == []
    assert bench.states()["0-0"][1] == "delivered"


def test_an_export_has_the_same_rows(bench: Bench, tmp_path: Path) -> None:
    capture(bench, range(1))
    bench.finalize("--format", "trajectory", "--sequences", "all")
    out = tmp_path / "out.jsonl"
    options = ["--records", bench.rollouts, "--fields", "reward", "--sequences", "all"]
    assert bench.tokcap("export", "-d", bench.database, "-o", out, *options).returncode == 0
    exported = [json.loads(line) for line in out.read_text().splitlines()]
    same = ("sequence", "sequences", "parent", "parent_token", "agent", "cause", "segment", "token_ids", "loss_mask")
    assert [{name: row[name] for name in same} for row in exported] == [
        {name: row[name] for name in same} for row in bench.rows()
    ]


def test_models_that_are_not_named_get_no_loss(bench: Bench) -> None:
    capture(bench, range(1))
    assert bench.summary("--format", "trajectory", "--models", "judge")["reasons"] == {"other_models": 1}
    bench.output.unlink()
    bench.finalize("--format", "trajectory", "--models", "policy*, judge")
    assert sum(bench.rows()[0]["loss_mask"]) == 3
    assert bench.finalize("--models", " , ").returncode == 2


def test_it_is_told_and_counted_why_rollouts_have_several_roots(bench: Bench, tmp_path: Path) -> None:
    capture(bench, range(2))
    bench.write(*(record(task) for task in range(2)))
    done = bench.finalize("--format", "trajectory")
    assert done.stderr.splitlines()[1:] == [
        "tokcap:      2 masked: multiple_roots",
        "tokcap:      2 began anew: retokenization",
        "tokcap:      2 began anew: sub_agent",
    ]
    listed = bench.tokcap("ls", "-d", bench.database).stdout
    assert "masked: multiple_roots: retokenization 1, sub_agent 1" in listed
    query = "SELECT DISTINCT latest_reason, latest_causes FROM rollout_overview"
    told = bench.tokcap("sql", query, "-d", bench.database, "--json")
    assert json.loads(told.stdout) == [
        {"latest_reason": "multiple_roots", "latest_causes": "retokenization 1, sub_agent 1"}
    ]
    page = tmp_path / "page.html"
    assert bench.tokcap("report", "--all", "-d", bench.database, "-o", page).returncode == 0
    assert "retokenization 2, sub_agent 2" in page.read_text()
