"""Of the outcomes on a rollout that on its newest version counts, whenever each was recorded."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from token_id_capture.protocols import TokenCaptureSnapshot
from token_id_capture.records import TokenEntry
from token_id_capture.store import RolloutFilter, TokenCaptureStore
from token_id_capture.store.file.read_only import read_only
from token_id_capture.store.maintain.health import examine
from token_id_capture.store.maintain.pruning import find_old
from token_id_capture.store.read import history
from token_id_capture.store.read.evidence import read_evidence


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[TokenCaptureStore]:
    """Two rollouts, each frozen, marked and frozen again; then an outcome on the new state, then one on the old."""
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        await judge(store, "masked", "masked", "delivered")
        await judge(store, "delivered", "delivered", "masked")
        yield store


async def judge(store: TokenCaptureStore, rollout_id: str, on_newer: str, on_older: str) -> None:
    call = TokenEntry(
        rollout_id=rollout_id,
        model_call_id="c0",
        prompt_token_ids=[1],
        generation_token_ids=[2],
        generation_log_probs=[-0.5],
    )
    await store.put(call)
    older = await store.freeze(rollout_id)
    await store.mark_incomplete(rollout_id, "c0", "id_mismatch")
    newer = await store.freeze(rollout_id)
    assert newer.version > older.version
    for snapshot, outcome in ((newer, on_newer), (older, on_older)):
        await store.record_outcome(snapshot.snapshot_id, snapshot.version, outcome, "multiple_roots")


async def drop(store: TokenCaptureStore, snapshot: TokenCaptureSnapshot) -> bool:
    return await store.drop(snapshot.rollout_id, snapshot_id=snapshot.snapshot_id, version=snapshot.version)


async def test_what_is_said_late_of_an_older_version_neither_frees_nor_keeps_the_newer(
    store: TokenCaptureStore,
) -> None:
    assert not await drop(store, await store.freeze("masked"))
    assert await drop(store, await store.freeze("delivered"))


async def test_the_database_itself_keeps_the_evidence(store: TokenCaptureStore) -> None:
    with contextlib.closing(sqlite3.connect(store.database, isolation_level=None)) as connection:
        with pytest.raises(sqlite3.IntegrityError, match="is evidence"):
            connection.execute("DELETE FROM snapshots WHERE rollout_id = 'masked'")
        assert connection.execute("DELETE FROM snapshots WHERE rollout_id = 'delivered'").rowcount == 2


async def test_lists_and_views_show_the_outcome_on_the_newest_version(store: TokenCaptureStore) -> None:
    listed = {summary.rollout_id: summary.outcome for summary in await store.list_rollouts()}
    assert listed == {"masked": "masked", "delivered": "delivered"}
    assert [one.rollout_id for one in await store.list_rollouts(wanted=RolloutFilter(masked=True))] == ["masked"]
    assert [seen.outcome for seen in (await store.describe_rollout("masked")).outcomes] == ["delivered", "masked"]
    with read_only(store.database) as connection:
        overview = connection.execute("SELECT rollout_id, latest_outcome FROM rollout_overview").fetchall()
        assert dict(overview) == listed
        kept = connection.execute("SELECT DISTINCT rollout_id, outcome, judged_version FROM kept_evidence").fetchall()
        assert kept == [("masked", "masked", 2)]
        assert [outcome.outcome for outcome in read_evidence(connection, "masked").outcomes] == ["delivered", "masked"]


async def test_reports_and_housekeeping_count_the_outcome_on_the_newest_version(store: TokenCaptureStore) -> None:
    with read_only(store.database) as connection:
        assert [one.rollout_id for one in history.kept_evidence(connection, 10)] == ["masked"]
        counted = {(count.outcome, count.rollouts) for count in history.outcome_counts(connection, 0.0, 1e12)}
    assert counted == {("masked", 1), ("delivered", 1)}
    assert examine(store.database).rollouts.masked.examples == ["masked"]
    assert find_old(store.database, older_than_seconds=-60).evidence == ("masked",)


async def test_a_outcome_on_an_older_version_that_repeats_itself_is_recorded_once(store: TokenCaptureStore) -> None:
    [older, newer] = (await store.describe_rollout("masked")).outcomes
    snapshot = await store.freeze("masked")
    for seen in (older, newer, older):
        await store.record_outcome(snapshot.snapshot_id, seen.version, seen.outcome, seen.reason)
    assert list((await store.describe_rollout("masked")).outcomes) == [older, newer]
