"""The benchmark runs, on workloads so small that its numbers say nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def run_bench(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "bench"), *arguments, "--directory", str(directory)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def bench(directory: Path, *arguments: str) -> Any:
    """What scripts/bench prints as JSON."""
    done = run_bench(directory, "--json", "--repeats", "1", "--check", *arguments)
    assert done.returncode == 0, done.stderr
    assert not list(directory.iterdir()), "files were left behind"
    return json.loads(done.stdout)


def test_every_workload_and_level_is_measured_for_all_stores(tmp_path: Path) -> None:
    found = bench(tmp_path, "--shrink", "32", "--level", "store", "--level", "response")
    store, response = found["levels"]["store"], found["levels"]["response"]
    assert sorted(store) == ["agent", "chat", "crowd", "long"]
    assert sorted(response) == ["agent", "chat", "long"]
    for cells in store.values():
        assert sorted(cells) == ["jsonl", "limit", "ours"]
        assert all(cell["calls_per_second"] > 0 and cell["put_p99_ms"] > 0 for cell in cells.values())
        # Nobody writes less than the limit, which has only what is new in each call.
        assert cells["limit"]["disk_kb_per_call"] < min(cells[name]["disk_kb_per_call"] for name in ("ours", "jsonl"))
    for cells in response.values():
        assert sorted(cells) == ["jsonl", "ours"]
    assert found["limits"]
    assert all(limit["holds"] is None for limit in found["limits"]), "shrunk workloads are not judged"


@pytest.mark.skipif(sys.platform != "linux", reason="the delay is a library that Linux's loader puts in between")
def test_the_fsync_delay_reaches_every_store(tmp_path: Path) -> None:
    found = bench(tmp_path, "--shrink", "32", "--workload", "long", "--fsync-delay", "20ms")
    (cells,) = found["levels"].values()
    for name, cell in cells["long"].items():
        assert cell["put_p50_ms"] >= 20, name


def test_processes_scale_and_memory_are_measured(tmp_path: Path) -> None:
    found = bench(tmp_path, "--shrink", "128", "--processes", "1,2", "--scale", "--memory")
    assert {limit["section"] for limit in found["limits"]} == {"writers", "scale", "memory"}
    assert set(found["levels"]["writers"]["crowd"]) == {"1 proc", "2 proc"}


@pytest.mark.skipif(sys.platform != "linux", reason="what servers spend is read from /proc")
def test_the_gateway_is_measured_beside_no_proxy_and_a_bare_one(tmp_path: Path) -> None:
    short = (
        "--shape",
        "chat",
        "--concurrency",
        "16",
        "--mode",
        "whole",
        "--workers",
        "2",
        "--no-paced",
        "--seconds",
        "0.1",
        "--trial",
    )
    servers = ("--server", "direct", "--server", "bare", "--server", "ours")
    done = run_bench(tmp_path, "gateway", "--json", "--repeats", "1", *short, *servers)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found["levels"]) == {"chat, whole"}
    for subjects in found["levels"].values():
        assert set(subjects) == {"16 at a time", "64 at a time, 2 workers"}
        one, several = subjects.values()
        assert set(one) == {"direct", "bare", "ours"}
        assert set(several) == {"bare", "ours"}
        for figures in (*one.values(), *several.values()):
            assert 0 < figures["first_ms"] <= figures["p50_ms"] <= figures["p99_ms"]
            assert figures["calls_per_second"] > 0
    assert {limit["section"] for limit in found["limits"]} == {"gateway"}
    assert all(limit["holds"] is None for limit in found["limits"]), "runs so short are not judged"


@pytest.mark.skipif(sys.platform != "linux", reason="what servers spend is read from /proc")
def test_what_continuity_costs_is_measured_with_and_without_history(tmp_path: Path) -> None:
    short = ("--tokens", "600", "--turns", "2", "--calls", "1", "--repeats", "1", "--trial")
    done = run_bench(tmp_path, "continuity", "--json", *short)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    cells = found["levels"]["continuity"]
    assert set(cells) == {"off", "exact"}
    for kinds in cells.values():
        assert all(kinds[kind]["cpu_ms_per_call"] > 0 for kind in ("with history", "without history"))
    assert [limit["holds"] for limit in found["limits"]] == [None] * 3


def test_a_duration_without_a_unit_is_refused(tmp_path: Path) -> None:
    done = run_bench(tmp_path, "--fsync-delay", "5")
    assert done.returncode == 2
    assert "write it like 5ms" in done.stderr


def test_a_outcome_says_its_bound_and_whether_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    from benchmark.limits import Outcome

    assert Outcome("levels", "calls/s", "chat", 1.2, True, 1.2).holds
    assert not Outcome("levels", "calls/s", "chat", 1.1, True, 1.2).holds
    assert Outcome("levels", "CPU", "chat", 0.8, False, 0.8).holds
    assert str(Outcome("levels", "CPU", "chat", 0.9, False, 0.8)) == "0.90 <= 0.8 MISSED"
    assert str(Outcome("levels", "CPU", "chat", 0.9, False, None)) == "0.90"


def test_prepared_calls_extend_one_another_and_are_the_same_in_both_forms(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    from benchmark.inputs import read_inputs, write_inputs
    from benchmark.workloads import WORKLOADS

    workload = WORKLOADS["agent"].shrunk(16)
    write_inputs(workload, tmp_path, ("arrays", "response"))
    arrays, responses = (read_inputs(tmp_path, form)[0] for form in ("arrays", "response"))
    known: list[int] = []
    for call, response in zip(arrays, responses, strict=True):
        assert (call.rollout_id, call.call_id) == (response.rollout_id, response.call_id)
        fields, whole = orjson.loads(call.body), orjson.loads(response.body)
        assert fields["prompt_token_ids"][: len(known)] == known
        known = fields["prompt_token_ids"] + fields["generation_token_ids"]
        (choice,) = whole["choices"]
        assert whole["prompt_token_ids"] == fields["prompt_token_ids"]
        assert choice["token_ids"] == fields["generation_token_ids"]
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == fields["generation_log_probs"]
        assert choice["message"]["content"] == fields["text"]
    assert len(known) == workload.prompt_length(workload.calls - 1) + workload.generated
