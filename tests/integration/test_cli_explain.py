"""``tokcap explain``: the command on real files, and that looking at a rollout changes nothing."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.commands import RunInstalled, RunTokcap, clean_environment
from support.many_rollouts import database_with
from support.terminal import on_terminal
from token_id_capture import reasons
from token_id_capture.consumer import trajectories_from_source
from token_id_capture.explanation.remedies import REMEDIES, SENTENCES
from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore
from token_id_capture.store.file.read_only import read_only
from token_id_capture.store.read.evidence import read_evidence

WORDS = ["<s>", "th", "e", "the", " c", "at", " ca", "t", " sat", " ran", " on", " mat", " dog"]
ID_OF = {word: number for number, word in enumerate(WORDS)}


def ids(*words: str) -> list[int]:
    return [ID_OF[word] for word in words]


def entry(
    call: str,
    prompt: Sequence[int],
    generation: Sequence[int],
    *,
    rollout_id: str = "r",
    created_at: float = 1.0,
    finish_reason: str = "stop",
) -> TokenEntry:
    return TokenEntry(
        rollout_id=rollout_id,
        model_call_id=call,
        prompt_token_ids=prompt,
        generation_token_ids=generation,
        generation_log_probs=[-0.5] * len(generation),
        created_at=created_at,
        finish_reason=finish_reason,
    )


DRIFT = (
    entry("first", ids("<s>", "the"), ids(" ca", "t", " sat")),
    entry("Second", ids("<s>", "the", " c", "at", " sat", " on"), ids(" mat"), created_at=2.0),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json in which "cat" can be written in two ways, as in any real vocabulary."""
    from tokenizers import Tokenizer, decoders, models

    words = Tokenizer(models.WordLevel(ID_OF, unk_token="<s>"))
    words.decoder = decoders.Fuse()
    words.add_special_tokens(["<s>"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    words.save(str(path))
    return path


def everything(path: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return list(connection.iterdump())


async def test_retokenisation_is_told_from_the_ids(tokcap: RunTokcap, tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path) as store:
        for call in DRIFT:
            await store.put(call)
    shown = tokcap("explain", "r", "-d", tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.splitlines()[:8] == [
        "rollout r: open, version 0",
        "It is open. Frozen now, it would be masked: multiple_roots.",
        "",
        f"multiple_roots: {SENTENCES['multiple_roots']}",
        "  Call 2 (Second) continues no earlier call. The closest is call 1 (first).",
        "  They differ first at position 2 of 5, in what it generated:",
        "    call 1 0 3 [6] 7 8",
        "    call 2 0 3 [4] 5 8 10",
    ]
    assert "  This looks like re-tokenisation: 2 tokens stand where 2 were, and then both agree again." in shown.stdout
    assert "  What to do: Nothing is wrong with the harness" in shown.stdout


async def test_a_tokenizer_adds_the_text_and_certainty(tokcap: RunTokcap, tmp_path: Path, tokenizer: Path) -> None:
    async with TokenCaptureStore(tmp_path) as store:
        for call in DRIFT:
            await store.put(call)
    shown = tokcap("explain", "r", "-d", tmp_path, "--tokenizer", tokenizer)
    assert shown.returncode == 0, shown.stderr
    assert "    call 1 reads '<s>the cat sat'" in shown.stdout
    assert "    call 2 reads '<s>the cat sat on'" in shown.stdout
    assert "  This is re-tokenisation: 2 tokens stand where 2 were, and both read the same." in shown.stdout
    (found,) = json.loads(tokcap("explain", "r", "-d", tmp_path, "--tokenizer", tokenizer, "--json").stdout)["findings"]
    (divergence,) = found["divergences"]
    assert divergence == {
        "call": "Second",
        "continues": None,
        "closest": "first",
        "position": 2,
        "closest_length": 5,
        "sampled_by": "first",
        "before": [0, 3],
        "expected": [6, 7, 8],
        "found": [4, 5, 8, 10],
        "expected_text": "<s>the cat sat",
        "found_text": "<s>the cat sat on",
        "cause": "retokenization",
        "because": "2 tokens stand where 2 were, and both read the same",
        "certain": True,
        "remedy": divergence["remedy"],
    }


async def test_a_tokenizer_that_cannot_be_read_is_one_line(tokcap: RunTokcap, tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path) as store:
        await store.put(DRIFT[0])
    (tmp_path / "broken.json").write_text("{}")
    for name in ("missing.json", "broken.json"):
        refused = tokcap("explain", "r", "-d", tmp_path, "--tokenizer", tmp_path / name)
        assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
        assert f"{name} as a tokenizer.json" in refused.stderr


async def test_without_the_library_the_extra_is_named(run_installed: RunInstalled, tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        await store.put(DRIFT[0])
    # A module of this name that cannot be imported stands before the installed one.
    (tmp_path / "tokenizers.py").write_text("raise ImportError('not here')\n")
    environment = {**clean_environment(), "PYTHONPATH": str(tmp_path)}
    refused = run_installed(
        *("explain", "r", "-d", tmp_path / "captures.db", "--tokenizer", "t.json"), env=environment, capture_output=True
    )
    assert refused.returncode == 2
    assert b"pip install 'token-id-capture[tokenizers]'" in refused.stderr


async def test_every_flag_is_explained(tokcap: RunTokcap, tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path) as store:
        await store.put(DRIFT[0])
        for number, reason in enumerate(reasons.FLAG_REASONS):
            await store.mark_incomplete("r", f"call-{number}", f"{reason}: particulars {number}")
    text = tokcap("explain", "r", "-d", tmp_path).stdout
    for number, reason in enumerate(reasons.FLAG_REASONS):
        assert f"{reason}: {SENTENCES[reason]}\n  call call-{number}: particulars {number}\n" in text
        assert f"  What to do: {REMEDIES[reason]}\n" in text


CAUSES: dict[str, list[TokenEntry]] = {
    reasons.ABORTED_CALL: [entry("a", [1], [2], finish_reason="abort")],
    reasons.CAPTURE_INCOMPLETE: [entry("a", [1], [2])],
    reasons.EMPTY_GENERATIONS: [entry("a", [1], [])],
    reasons.MULTIPLE_CHAINS: [entry("a", [1], [2]), entry("b", [1, 2, 3], [4]), entry("c", [1, 2, 5], [6])],
    reasons.MULTIPLE_ROOTS: [entry("a", [1], [2]), entry("b", [3], [4])],
    reasons.UNRESOLVED_RETRY: [entry("a", [1], [2]), entry("b", [1], [3])],
    reasons.NOTHING_RECORDED: [],
}


@pytest.mark.parametrize("reason", CAUSES)
async def test_every_outcome_is_explained_after_the_freeze(tokcap: RunTokcap, tmp_path: Path, reason: str) -> None:
    async with TokenCaptureStore(tmp_path) as store:
        for call in CAUSES[reason]:
            await store.put(call)
        if reason in (reasons.CAPTURE_INCOMPLETE, reasons.NOTHING_RECORDED):
            await store.begin_call("r", "lost")
        if reason == reasons.NOTHING_RECORDED:
            await store.refuse_call("r", "lost", "HTTP 400")
        assert (await trajectories_from_source("r", store))["reason"] == reason
    text = tokcap("explain", "r", "-d", tmp_path).stdout
    assert f"It is frozen. The latest outcome is: masked, {reason}.\n\n{reason}: {SENTENCES[reason]}\n" in text
    assert "What to do: " in text


async def test_a_lost_call_names_its_process(tokcap: RunTokcap, tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path) as store:
        await store.begin_call("r", "lost")
        await store.freeze("r")
    text = tokcap("explain", "r", "-d", tmp_path).stdout
    assert f"  call lost: begun by process {os.getpid()} on {os.uname().nodename} at " in text


async def test_a_retired_rollout_is_explained_by_what_was_recorded(tokcap: RunTokcap, tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path) as store:
        await store.put(DRIFT[0])
        snapshot = await store.freeze("r")
        await store.record_outcome(snapshot.snapshot_id, snapshot.version, "delivered")
        assert await store.drop("r", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    shown = tokcap("explain", "r", "-d", tmp_path)
    assert shown.stdout.splitlines() == [
        "rollout r: retired, version 1",
        "It is retired, and its captures are deleted: it was delivered, unmasked.",
    ]


@pytest.mark.parametrize("rollout", ["open", "frozen", "masked", "retired"])
async def test_explaining_changes_nothing(tokcap: RunTokcap, tmp_path: Path, rollout: str) -> None:
    async with TokenCaptureStore(tmp_path) as store:
        for call in DRIFT:
            await store.put(call.model_copy(update={"rollout_id": rollout}))
        await store.begin_call(rollout, "lost")
        if rollout in ("frozen", "retired"):
            await store.freeze(rollout)
        if rollout == "masked":
            await trajectories_from_source(rollout, store)
        if rollout == "retired":
            await store.retire([rollout])
        before = everything(store.database)
        for options in ([], ["--json"]):
            assert tokcap("explain", rollout, "-d", tmp_path, *options).returncode == 0
        assert everything(store.database) == before
        assert (await store.describe_rollout(rollout)).summary.state == {"masked": "frozen"}.get(rollout, rollout)


async def test_what_cannot_be_explained_is_one_line(tokcap: RunTokcap, tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path) as store:
        for call in DRIFT:
            await store.put(call)
    unknown = tokcap("explain", "nobody", "-d", tmp_path)
    assert "no rollout 'nobody' is in this database" in unknown.stderr
    malformed = tokcap("explain", "a b", "-d", tmp_path)
    assert "invalid rollout id" in malformed.stderr
    missing = tokcap("explain", "r", "-d", tmp_path / "none.db")
    assert "there is no capture database" in missing.stderr
    with contextlib.closing(sqlite3.connect(store.database)) as connection, connection:
        connection.execute("UPDATE entries SET generation = x'090000000900000009000000' WHERE model_call_id = 'first'")
    damaged = tokcap("explain", "r", "-d", tmp_path)
    assert "call 'first' of rollout 'r' is damaged" in damaged.stderr
    for refused in (unknown, malformed, missing, damaged):
        assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)


async def test_text_from_an_engine_cannot_steer_the_terminal(tokcap: RunTokcap, tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path) as store:
        await store.mark_incomplete("r", "call\x1b[2J", "lost_stream: \x1b]0;owned\x07")
    shown = tokcap("explain", "r", "-d", tmp_path).stdout
    assert "\\x1b]0;owned\\x07" in shown
    assert "\x1b" not in shown


async def test_a_narrow_terminal_gets_wrapped_paragraphs(tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path) as store:
        for call in DRIFT:
            await store.put(call)
    lines = on_terminal(48, "explain", "r", "-d", tmp_path, TERM="xterm-256color").splitlines()
    assert max(map(len, lines)) <= 48
    assert "multiple_roots: A prompt continues no earlier" in lines
    assert not any("\x1b" in line for line in lines)


async def test_a_reader_that_leaves_early_gets_no_complaint(run_installed: RunInstalled, tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path) as store:
        await store.put(DRIFT[0])
    read, write = os.pipe()
    os.close(read)
    try:
        left = run_installed("explain", "r", "-d", tmp_path, stdout=write, stderr=subprocess.PIPE)
    finally:
        os.close(write)
    assert (left.returncode, left.stderr) == (1, b"")


def thousands_of_instructions(path: Path, rollout_id: str) -> int:
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        ticks += 1

    with read_only(path) as connection:
        connection.set_progress_handler(tick, 1_000)
        assert read_evidence(connection, rollout_id).snapshot.entries
    return ticks


def test_reading_one_rollout_costs_the_same_in_a_large_file(tmp_path_factory: pytest.TempPathFactory) -> None:
    few, many = (
        thousands_of_instructions(database_with(rollouts, tmp_path_factory), "rollout-0000015")
        for rollouts in (400, 4_000)
    )
    assert many <= few + 1
    assert many < 10


def test_a_long_rollout_among_many_is_explained(tokcap: RunTokcap, tmp_path_factory: pytest.TempPathFactory) -> None:
    shown = tokcap("explain", "zz-long", "-d", database_with(4_000, tmp_path_factory), "--json")
    (found,) = json.loads(shown.stdout)["findings"]
    (divergence,) = found["divergences"]
    assert (divergence["position"], divergence["cause"]) == (5, "edited_history")
