"""``tokcap ls`` with filters: what each lets through, page by page, and what it costs in a large file."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sqlite3
import subprocess
import time
from pathlib import Path

import pytest

from support.commands import TOKCAP, RunTokcap, clean_environment
from support.many_rollouts import database_with
from token_id_capture.lifecycle import State
from token_id_capture.records import TokenEntry
from token_id_capture.store import RolloutFilter, TokenCaptureStore
from token_id_capture.store.file.read_only import read_only
from token_id_capture.store.read.listing import list_rollouts

DAY = 86_400.0


def entry(rollout_id: str, call: str, model: str) -> TokenEntry:
    return TokenEntry(
        rollout_id=rollout_id,
        model_call_id=call,
        model=model,
        prompt_token_ids=[1, 2],
        generation_token_ids=[3],
        generation_log_probs=[-0.5],
    )


async def fill(path: Path) -> None:
    async with TokenCaptureStore(path) as store:
        for name in ("delivered", "failed", "flagged", "masked", "open", "reviewed", "running"):
            await store.put(entry(name, "first", "small"))
        await store.put(entry("open", "second", "large"))
        await store.begin_call("running", "now")
        await store.begin_call("open", "refused")
        await store.refuse_call("open", "refused", "context too long")
        await store.mark_incomplete("flagged", "first", "id_mismatch")
        outcomes = [("delivered", "delivered"), ("failed", "failed"), ("masked", "masked"), ("reviewed", "masked")]
        for name, outcome in [*outcomes, ("reviewed", "delivered")]:
            snapshot = await store.freeze(name)
            await store.record_outcome(snapshot.snapshot_id, snapshot.version, outcome, "multiple_roots")
        await store.put(entry("gone", "first", "small"))
        await store.retire(["gone"])
    age = {"delivered": 3 * DAY, "failed": 2 * DAY}
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        for name, seconds in age.items():
            connection.execute("UPDATE rollouts SET opened_at = opened_at - ? WHERE rollout_id = ?", (seconds, name))


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ls") / "captures.db"
    asyncio.run(fill(path))
    return path


ALL = ["delivered", "failed", "flagged", "gone", "masked", "open", "reviewed", "running"]


def listed(tokcap: RunTokcap, database: Path, *options: object) -> list[str]:
    shown = tokcap("ls", "-d", database, "--json", *options)
    assert shown.returncode == 0, shown.stderr
    return [rollout["rollout_id"] for rollout in json.loads(shown.stdout)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ALL),
        (["--state", "open"], ["flagged", "open", "running"]),
        (["--state", "frozen"], ["delivered", "failed", "masked", "reviewed"]),
        (["--state", "retired"], ["gone"]),
        (["--masked"], ["failed", "masked"]),
        (["--incomplete"], ["flagged", "running"]),
        (["--model", "large"], ["open"]),
        (["--model", "small"], [name for name in ALL if name != "gone"]),
        (["--model", "none"], []),
        (["--since", "36h"], [name for name in ALL if name not in ("delivered", "failed")]),
        (["--since", "60h"], [name for name in ALL if name != "delivered"]),
        (["--since", "2001-01-01"], ALL),
        (["--since", "2999-01-01T00:00:00Z"], []),
        (["--masked", "--since", "36h"], ["masked"]),
        (["--incomplete", "--state", "open", "--model", "small"], ["flagged", "running"]),
        (["--masked", "--state", "open"], []),
    ],
)
def test_each_filter_lets_through_what_it_says(
    tokcap: RunTokcap, database: Path, options: list[str], expected: list[str]
) -> None:
    assert listed(tokcap, database, *options) == expected


def test_a_filtered_list_goes_on_page_by_page(tokcap: RunTokcap, database: Path) -> None:
    seen, after = [], ""
    while True:
        page = tokcap("ls", "-d", database, "--json", "--state", "frozen", "--limit", 3, "--after", after)
        seen.append([rollout["rollout_id"] for rollout in json.loads(page.stdout)])
        if "there are more" not in page.stderr:
            break
        after = page.stderr.split("--after ")[1].strip()
    assert seen == [["delivered", "failed", "masked"], ["reviewed"]]


@pytest.mark.parametrize("since", ["yesterday", "", "3", "5M", "2026-13-01", "-2h"])
def test_a_time_that_is_none_is_refused_in_one_line(tokcap: RunTokcap, database: Path, since: str) -> None:
    refused = tokcap("ls", "-d", database, f"--since={since}")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert refused.stderr.startswith("tokcap: --since: ")


def test_listing_makes_no_writer(tokcap: RunTokcap, database: Path) -> None:
    def writers() -> int:
        with contextlib.closing(sqlite3.connect(database)) as connection:
            count: int = connection.execute("SELECT count(*) FROM writers").fetchone()[0]
            return count

    before = writers()
    assert listed(tokcap, database)
    assert writers() == before


def instructions(path: Path, wanted: RolloutFilter) -> tuple[int, int]:
    """How many instructions SQLite's machine ran for a page, in thousands, and how many rollouts it found."""
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        ticks += 1

    with read_only(path) as connection:
        connection.set_progress_handler(tick, 1_000)
        found = list_rollouts(connection.execute, "", 51, wanted)
    return ticks, len(found)


@pytest.mark.parametrize(
    "wanted",
    [
        RolloutFilter(),
        RolloutFilter(state=State.RETIRED),
        RolloutFilter(opened_since=1.0),
        RolloutFilter(model="policy-70b"),
    ],
)
def test_the_first_page_costs_the_same_in_a_large_file(
    tmp_path_factory: pytest.TempPathFactory, wanted: RolloutFilter
) -> None:
    few, found = instructions(database_with(400, tmp_path_factory), wanted)
    many, found_among_many = instructions(database_with(4_000, tmp_path_factory), wanted)
    assert found == found_among_many == 51
    assert many <= few + 2


@pytest.mark.parametrize(
    "wanted",
    [
        RolloutFilter(masked=True),
        RolloutFilter(incomplete=True),
        RolloutFilter(opened_since=9e12),
        RolloutFilter(model="none"),
        RolloutFilter(state=State.FROZEN, masked=True, incomplete=True, model="none"),
    ],
)
def test_a_filter_that_finds_next_to_nothing_costs_some_dozen_instructions_a_rollout(
    tmp_path_factory: pytest.TempPathFactory, wanted: RolloutFilter
) -> None:
    # A hundred thousand rollouts are then some million instructions: tenths of a second.
    ticks, _ = instructions(database_with(4_000, tmp_path_factory), wanted)
    assert ticks * 1_000 / 4_000 < 60


@pytest.mark.parametrize("arguments", [["ls", "--limit", "4000", "--json"], ["export", "-o", "-"]], ids=" ".join)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_in_the_middle_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, arguments: list[str], unbuffered: str
) -> None:
    command = [str(TOKCAP), *arguments, "-d", str(database_with(4_000, tmp_path_factory))]
    environment = {**clean_environment(), "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_ctrl_c_ends_a_listing_without_a_traceback(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = database_with(4_000, tmp_path_factory)
    command = [str(TOKCAP), "ls", "-d", str(path), "--limit", "4000"]
    with subprocess.Popen(command, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        _, complaint = process.communicate(timeout=30)
    assert process.returncode in (130, 0)  # it may have been done already
    assert b"Traceback" not in complaint
    assert time.monotonic() - started < 30
