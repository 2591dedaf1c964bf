"""The clock is set while a rollout runs: what was recorded counts all the same."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path

import pytest

from token_id_capture import reasons
from token_id_capture.records import TokenEntry
from token_id_capture.store import RolloutFilter, TokenCaptureStore
from token_id_capture.store.file.read_only import read_only
from token_id_capture.store.maintain.health import examine
from token_id_capture.store.read.evidence import read_evidence

HOUR = 3600.0


def entry(call: str) -> TokenEntry:
    return TokenEntry(
        rollout_id="r",
        model_call_id=call,
        prompt_token_ids=[1],
        generation_token_ids=[2],
        generation_log_probs=[-0.5],
    )


class Clock:
    """What ``time.time`` says, and by how much it is wrong."""

    def __init__(self) -> None:
        self.ahead = 0.0
        self._true = time.time

    def __call__(self) -> float:
        return self._true() + self.ahead


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "time", clock)
    return clock


@pytest.mark.parametrize("change", [-HOUR, HOUR])
async def test_an_outcome_is_seen_whatever_the_clock_said_when_it_was_recorded(
    change: float, clock: Clock, tmp_path: Path
) -> None:
    async with TokenCaptureStore(tmp_path) as store:
        await store.put(entry("a"))
        clock.ahead = change
        snapshot = await store.freeze("r")
        await store.record_outcome(snapshot.snapshot_id, snapshot.version, "failed", "judged")
        (listed,) = await store.list_rollouts(wanted=RolloutFilter(masked=True))
        assert (listed.outcome, listed.reason) == ("failed", "judged")
        assert [seen.outcome for seen in (await store.describe_rollout("r")).outcomes] == ["failed"]
        with read_only(store.database) as connection:
            assert [seen.outcome for seen in read_evidence(connection, "r").outcomes] == ["failed"]


async def test_an_outcome_on_an_earlier_use_of_the_id_is_not_taken_for_one_on_this(
    clock: Clock, tmp_path: Path
) -> None:
    async with TokenCaptureStore(tmp_path) as store:
        await store.put(entry("a"))
        snapshot = await store.freeze("r")
        await store.record_outcome(snapshot.snapshot_id, snapshot.version, "masked", "judged")
        await store.delete(["r"])
        clock.ahead = -HOUR
        await store.put(entry("b"))
        await store.freeze("r")
        assert (await store.describe_rollout("r")).outcomes == ()
        assert await store.list_rollouts(wanted=RolloutFilter(masked=True)) == []


async def test_what_became_of_a_rollout_that_was_retired_by_hand_stays_known_and_its_drop_fails(tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path) as store:
        await store.put(entry("a"))
        snapshot = await store.freeze("r")
        await store.record_outcome(snapshot.snapshot_id, snapshot.version, "masked", "judged")
        await store.retire(["r"])
        outcomes = (await store.describe_rollout("r")).outcomes
        assert [(seen.outcome, seen.reason) for seen in outcomes] == [
            ("masked", "judged"),
            ("released", reasons.RETIRED_BY_HAND),
        ]
        assert not await store.drop("r", snapshot_id=snapshot.snapshot_id, version=snapshot.version)


async def test_open_calls_are_told_in_the_order_in_which_they_began(clock: Clock, tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path) as store:
        await store.begin_call("r", "first")
        clock.ahead = -HOUR
        await store.begin_call("r", "second")
        intents = (await store.describe_rollout("r")).intents
    assert [intent.model_call_id for intent in intents] == ["first", "second"]
    assert [call.model_call_id for call in examine(store.database).open_calls] == ["first", "second"]


async def test_a_process_is_seen_again_though_the_clock_went_back(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with TokenCaptureStore(tmp_path) as store:
        await store.put(entry("a"))
        clock.ahead = -HOUR
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 60)
        await store.put(entry("b"))
        with contextlib.closing(sqlite3.connect(store.database)) as connection:
            (seen,) = connection.execute("SELECT last_seen_at FROM writers").fetchone()
    assert seen == pytest.approx(time.time(), abs=600)
