"""``tokcap doctor``: what a crash left behind, told by the real command about real processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.captured import WAITS_FOR_EVER, content, entry, filled, finish, one_line, process, put_chain, sql
from support.commands import RunTokcap
from support.terminal import on_terminal
from token_id_capture.store import TokenCaptureStore

CALLS_IN_FLIGHT = f"""
await put_chain(store, "math-0", turns=2)
await store.begin_call("math-0", "in-flight-0")
await store.begin_call("math-1", "in-flight-1")
await store.begin_call("math-1", "refused")
await store.refuse_call("math-1", "refused", "too long")
ready()
{WAITS_FOR_EVER}
"""


def examined(tokcap: RunTokcap, database: Path, code: int) -> Any:
    shown = tokcap("doctor", "--database", database, "--json")
    assert shown.returncode == code, shown.stdout + shown.stderr
    return json.loads(shown.stdout)


def fates(facts: Any) -> dict[str, str]:
    return {call["model_call_id"]: call["fate"] for call in facts["open_calls"]}


def test_calls_of_a_process_that_runs_are_in_flight_and_those_of_a_killed_one_are_lost(
    tokcap: RunTokcap, tmp_path: Path
) -> None:
    database = tmp_path / "captures.db"
    with process(database, CALLS_IN_FLIGHT) as writer:
        facts = examined(tokcap, database, code=0)
        assert fates(facts) == {"in-flight-0": "in_flight", "in-flight-1": "in_flight"}
        assert [(one["pid"], one["liveness"]) for one in facts["processes"]] == [(writer.pid, "alive")]
        assert facts["findings"] == []
        assert any(note.startswith("2 calls in flight, the oldest for") for note in facts["notes"])

        writer.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOWAIT)
        # It is dead, and not yet reaped by its parent: kill(pid, 0) still finds it.
        assert fates(examined(tokcap, database, code=1)) == {"in-flight-0": "lost", "in-flight-1": "lost"}
    facts = examined(tokcap, database, code=1)
    assert fates(facts) == {"in-flight-0": "lost", "in-flight-1": "lost"}
    lost, waiting, empty = facts["findings"]
    assert lost.startswith(f"2 calls of 2 rollouts were lost: process {writer.pid} on {socket.gethostname()} died")
    assert waiting.startswith("1 rollout (math-0) is open with captured calls, and no process writes any more")
    assert empty.startswith("1 rollout (math-1) is open without a captured call")
    a_person_gets_the_lost_calls_and_what_to_do(tokcap("doctor", "-d", database), database, writer.pid)


def test_a_terminal_gets_whole_words(tmp_path: Path) -> None:
    async def some_open(store: TokenCaptureStore) -> None:
        for number in range(3):
            await put_chain(store, f"a-rollout-with-a-rather-long-id-{number}")
            await finish(store, f"a-rollout-with-a-rather-long-id-{number}", "masked", "capture_incomplete")

    database = filled(tmp_path / "captures.db", some_open)
    wide, narrow = (on_terminal(width, "doctor", "-d", database, TERM="dumb") for width in (400, 60))
    ages = re.compile(r"\d+s")
    # Cells of a narrow table continue below each other, so the words come in another order.
    narrow_words, wide_words = (
        sorted(word for word in text.split() if not ages.fullmatch(word)) for text in (narrow, wide)
    )
    assert narrow_words == wide_words
    assert [line for line in narrow.splitlines() if len(line) > 60 and len(line.split()) > 1] == []


def a_person_gets_the_lost_calls_and_what_to_do(
    shown: subprocess.CompletedProcess[str], database: Path, pid: int
) -> None:
    assert (shown.returncode, shown.stderr) == (1, "")
    lines = shown.stdout.splitlines()
    assert lines[0].split() == ["database", str(database)]
    table = lines.index("calls without tokens")
    assert [line.split()[:3] for line in lines[table + 2 : table + 4]] == [
        ["math-0", "in-flight-0", "lost"],
        ["math-1", "in-flight-1", "lost"],
    ]
    assert str(pid) in lines[lines.index("processes") + 2]
    assert lines.index("needs you") < lines.index("good to know")
    assert "tokcap finalize" in shown.stdout


async def everything_handed_on(store: TokenCaptureStore) -> None:
    await put_chain(store, "math-0")
    snapshot = await store.freeze("math-0")
    await store.record_outcome(snapshot.snapshot_id, snapshot.version, "delivered")
    await store.drop("math-0", snapshot_id=snapshot.snapshot_id, version=snapshot.version)


def test_a_database_whose_rollouts_were_all_handed_on_is_healthy(tokcap: RunTokcap, tmp_path: Path) -> None:
    database = filled(tmp_path / "captures.db", everything_handed_on)
    shown = tokcap("doctor", "-d", tmp_path)  # a directory means token_captures.db in it
    assert shown.returncode == 2
    shown = tokcap("doctor", "-d", database)
    assert shown.returncode == 0, shown.stdout
    assert "nothing to do" in shown.stdout
    assert "0 open, 0 frozen, 1 retired" in shown.stdout
    assert "structure  sound" in shown.stdout
    assert "structure  not checked" in tokcap("doctor", "-d", database, "--no-check").stdout


async def rollouts_in_every_state(store: TokenCaptureStore) -> None:
    for number in range(7):
        await put_chain(store, f"open-{number}", turns=1)
    await store.freeze("open-6")  # frozen, and nobody said what became of it
    for name, outcome, reason in (
        ("delivered", "delivered", ""),
        ("late", "delivered", ""),
        ("masked-0", "masked", "multiple_roots"),
        ("masked-1", "masked", "multiple_roots"),
        ("failed", "failed", "build_failed"),
    ):
        await put_chain(store, name, turns=1)
        await finish(store, name, outcome, reason)
    await store.mark_incomplete("late", "c0", "log_prob_placeholder")


def test_rollouts_are_counted_by_what_is_still_to_be_done_with_them(tokcap: RunTokcap, tmp_path: Path) -> None:
    database = filled(tmp_path / "captures.db", rollouts_in_every_state)
    kill_writers(database)
    facts = examined(tokcap, database, code=1)
    rollouts = facts["rollouts"]
    assert rollouts.pop("by_state") == {"open": 6, "frozen": 6}
    assert {name: (one["count"], one["reasons"]) for name, one in rollouts.items()} == {
        "open_with_calls": (6, {}),
        "open_without_calls": (0, {}),
        "frozen_without_outcome": (1, {}),
        "delivered_not_retired": (1, {}),
        "marked_since_delivery": (1, {}),
        "masked": (2, {"multiple_roots": 2}),
        "failed": (1, {"build_failed": 1}),
    }
    assert rollouts["open_with_calls"]["examples"] == [f"open-{number}" for number in range(5)]
    assert [finding.partition(":")[0] for finding in facts["findings"]] == [
        "6 rollouts (open-0, open-1, open-2, open-3, open-4, ...) are open with captured calls, "
        "and no process writes any more",
        "1 rollout (open-6) is frozen without an outcome, and no process writes any more",
        "1 rollout (late) is marked incomplete after the delivery",
    ]
    assert any("2 rollouts (masked-0, masked-1) are masked and kept as evidence (multiple_roots 2)" in note
               for note in facts["notes"])  # fmt: skip


def test_what_waits_is_no_finding_while_a_process_writes(tokcap: RunTokcap, tmp_path: Path) -> None:
    database = filled(tmp_path / "captures.db", rollouts_in_every_state)
    facts = examined(tokcap, database, code=1)  # the process that wrote is this one
    assert [finding.partition(":")[0] for finding in facts["findings"]] == [
        "1 rollout (late) is marked incomplete after the delivery"
    ]
    assert any(note.startswith("6 rollouts (open-0,") for note in facts["notes"])


async def calls_that_ended_badly(store: TokenCaptureStore) -> None:
    await store.begin_call("flagged", "c0")
    await store.mark_incomplete("flagged", "c0", "unknown_outcome: status 500")
    await store.begin_call("dealt-with", "c0")
    await finish(store, "dealt-with", "masked", "capture_incomplete")


def test_a_loss_that_somebody_dealt_with_is_no_finding(tokcap: RunTokcap, tmp_path: Path) -> None:
    database = filled(tmp_path / "captures.db", calls_that_ended_badly)
    kill_writers(database)
    facts = examined(tokcap, database, code=1)
    assert {call["rollout_id"]: call["fate"] for call in facts["open_calls"]} == {
        "flagged": "failed",
        "dealt-with": "lost",
    }
    assert not any("lost" in finding for finding in facts["findings"])
    assert facts["notes"][:2] == [
        "1 lost call in rollouts that were masked or failed already.",
        "1 call of 1 rollout was left without tokens, and flagged: unknown_outcome 1.",
    ]


def kill_writers(database: Path) -> None:
    """Make the rows of this test's own process look like those of the machine's boot before."""
    sql(database, "UPDATE writers SET boot_id = 'an earlier boot'")


def test_a_process_of_an_earlier_boot_is_dead_and_one_of_another_host_is_unknown(
    tokcap: RunTokcap, tmp_path: Path
) -> None:
    async def one_open_call(store: TokenCaptureStore) -> None:
        await store.begin_call("math-0", "c0")

    database = filled(tmp_path / "captures.db", one_open_call)
    assert fates(examined(tokcap, database, code=0)) == {"c0": "in_flight"}  # by this very process
    kill_writers(database)
    assert fates(examined(tokcap, database, code=1)) == {"c0": "lost"}
    sql(database, "UPDATE writers SET host = 'container-7'")
    facts = examined(tokcap, database, code=1)
    assert fates(facts) == {"c0": "unknown"}
    assert "cannot see (container-7)" in facts["findings"][0]


def test_doctor_changes_nothing(tokcap: RunTokcap, tmp_path: Path) -> None:
    database = filled(tmp_path / "captures.db", rollouts_in_every_state)
    before = content(database)
    examined(tokcap, database, code=1)
    assert content(database) == before


def test_a_file_that_others_can_read_is_a_finding(tokcap: RunTokcap, tmp_path: Path) -> None:
    database = filled(tmp_path / "captures.db", everything_handed_on)
    os.chmod(database, 0o644)
    finding = one_line("\n".join(examined(tokcap, database, code=1)["findings"]))
    assert finding.endswith(f"chmod 600 {database}")


def test_a_damaged_structure_is_a_finding(tokcap: RunTokcap, tmp_path: Path) -> None:
    database = filled(tmp_path / "captures.db", rollouts_in_every_state)
    page = sql(database, "SELECT rootpage FROM sqlite_master WHERE name = 'late_writes'")[0][0]
    damaged = bytearray(content(database))
    damaged[4096 * (page - 1) : 4096 * page] = b"\xa5" * 4096
    database.write_bytes(damaged)
    facts = examined(tokcap, database, code=1)
    assert facts["file"]["structure_damage"]
    assert any("the structure of the file is damaged" in finding for finding in facts["findings"])


def test_a_file_that_cannot_be_used_is_one_line_and_code_2(tokcap: RunTokcap, tmp_path: Path) -> None:
    newer = filled(tmp_path / "newer.db", everything_handed_on)
    sql(newer, "UPDATE alembic_version SET version_num = '9999'")
    sql(tmp_path / "foreign.db", "CREATE TABLE things (thing)")
    (tmp_path / "text.db").write_text("no database at all\n" * 100)
    (tmp_path / "empty.db").touch()
    for name, message in (
        ("missing.db", "no capture database"),
        ("newer.db", "upgrade token-id-capture"),
        ("foreign.db", "database of another program"),
        ("text.db", "not a usable SQLite database"),
        ("empty.db", "empty file"),
    ):
        refused = tokcap("doctor", "-d", tmp_path / name)
        assert (refused.returncode, refused.stdout) == (2, ""), name
        assert message in one_line(refused.stderr)
    assert not (tmp_path / "missing.db").exists()


@pytest.mark.parametrize("late", [False, True])
def test_a_rollout_frozen_while_a_call_ran_is_told_apart_from_a_loss(
    tokcap: RunTokcap, tmp_path: Path, late: bool
) -> None:
    async def overtake(store: TokenCaptureStore) -> None:
        await store.begin_call("math-0", "c0")
        await store.freeze("math-0")
        if late:
            with pytest.raises(RuntimeError, match="already frozen"):
                await store.put(entry("math-0", "c0", [1], [2]))

    database = filled(tmp_path / "captures.db", overtake)
    assert fates(examined(tokcap, database, code=0)) == {"c0": "overtaken"}
    assert asyncio.run(described(database)) == ("frozen", 1)


async def described(database: Path) -> tuple[str, int]:
    async with TokenCaptureStore(database) as store:
        summary = (await store.describe_rollout("math-0")).summary
        return summary.state, summary.open_intents
