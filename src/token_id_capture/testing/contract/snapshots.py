"""Snapshots: frozen once, made stale by every mark, and deleted only on proof."""

from __future__ import annotations

import asyncio

import pytest

from token_id_capture import reasons
from token_id_capture.errors import RolloutFrozenError, RolloutRetiredError
from token_id_capture.testing.contract.harness import ROLLOUT, Contract, OpenedStore, make_entry, scenario


class SnapshotContract(Contract):
    """What ``TokenSource`` and ``TokenSink.mark_incomplete`` promise."""

    @scenario
    async def test_freezing_again_gives_the_same_snapshot(self, first: OpenedStore, second: OpenedStore) -> None:
        await first.sink.put(make_entry("call"))
        snapshots = await asyncio.gather(*(store.source.freeze(ROLLOUT) for store in (first, second, first, second)))
        assert len({(snapshot.snapshot_id, snapshot.version) for snapshot in snapshots}) == 1
        assert snapshots[0].snapshot_id
        assert all(snapshot == snapshots[0] for snapshot in snapshots)
        assert snapshots[0].rollout_id == ROLLOUT

    @scenario
    async def test_a_late_call_changes_nothing_and_does_not_come_back(
        self, first: OpenedStore, second: OpenedStore
    ) -> None:
        await first.sink.put(make_entry("call"))
        snapshot = await second.source.freeze(ROLLOUT)
        with pytest.raises(RolloutFrozenError, match="already frozen") as caught:
            await first.sink.put(make_entry("late"))
        assert isinstance(caught.value, RuntimeError)
        assert await second.source.freeze(ROLLOUT) == snapshot
        assert await second.drop(snapshot)
        with pytest.raises(RolloutRetiredError):
            await first.sink.put(make_entry("later still"))
        with pytest.raises(RolloutRetiredError):
            await second.source.freeze(ROLLOUT)

    @scenario
    async def test_a_rollout_that_nobody_has_seen_is_empty_and_not_fenced(self, store: OpenedStore) -> None:
        snapshot = await store.source.freeze(ROLLOUT)
        assert (snapshot.entries, snapshot.incomplete, snapshot.snapshot_id) == ((), False, "")
        assert not await store.drop(snapshot)
        await store.sink.put(make_entry("call"))
        assert len((await store.source.freeze(ROLLOUT)).entries) == 1

    @scenario
    async def test_rollouts_do_not_touch_each_other(self, store: OpenedStore) -> None:
        for rollout_id in ("a", "b", "A", "a-a1"):
            await store.sink.put(make_entry("call", rollout_id=rollout_id, model=rollout_id))
        await store.sink.mark_incomplete("a")
        await store.source.freeze("b")
        for rollout_id in ("A", "a-a1"):
            await store.sink.put(make_entry("second", rollout_id=rollout_id))
            snapshot = await store.source.freeze(rollout_id)
            assert [entry.model for entry in snapshot.entries] == [rollout_id, ""]
            assert not snapshot.incomplete

    @scenario
    async def test_a_mark_makes_a_rollout_incomplete(self, store: OpenedStore) -> None:
        await store.sink.put(make_entry("call"))
        await store.sink.mark_incomplete(ROLLOUT, "other call", f"{reasons.NO_TOKEN_IDS}: no ids in the response")
        snapshot = await store.source.freeze(ROLLOUT)
        assert snapshot.incomplete
        assert len(snapshot.entries) == 1

    @scenario
    async def test_a_mark_alone_is_a_rollout_without_entries(self, store: OpenedStore) -> None:
        await store.sink.mark_incomplete(ROLLOUT)
        snapshot = await store.source.freeze(ROLLOUT)
        assert (snapshot.entries, snapshot.incomplete) == ((), True)
        assert snapshot.snapshot_id

    @scenario
    async def test_each_mark_after_a_freeze_raises_the_version(self, first: OpenedStore, second: OpenedStore) -> None:
        await first.sink.put(make_entry("call"))
        snapshots = [await second.source.freeze(ROLLOUT)]
        for _ in range(2):
            # The same words each time: a second loss of the same kind is a second loss.
            await first.sink.mark_incomplete(ROLLOUT, "call", reasons.LOST_STREAM)
            snapshots.append(await second.source.freeze(ROLLOUT))
        assert {snapshot.snapshot_id for snapshot in snapshots} == {snapshots[0].snapshot_id}
        assert snapshots[0].version < snapshots[1].version < snapshots[2].version
        assert [snapshot.incomplete for snapshot in snapshots] == [False, True, True]
        assert all(snapshot.entries == snapshots[0].entries for snapshot in snapshots)

    @scenario
    async def test_a_mark_between_freeze_and_drop_keeps_the_evidence(
        self, first: OpenedStore, second: OpenedStore
    ) -> None:
        await first.sink.put(make_entry("call"))
        snapshot = await second.source.freeze(ROLLOUT)
        await first.sink.mark_incomplete(ROLLOUT, "", reasons.CAPTURE_FAILED)
        assert not await second.drop(snapshot)
        newer = await second.source.freeze(ROLLOUT)
        assert newer.entries == snapshot.entries
        assert newer.incomplete
        assert not await second.drop(snapshot)
        assert await second.drop(newer)

    @scenario
    async def test_a_drop_that_differs_in_anything_deletes_nothing(self, store: OpenedStore) -> None:
        await store.sink.put(make_entry("call"))
        await store.sink.put(make_entry("call", rollout_id="other"))
        assert not await store.source.drop(ROLLOUT, snapshot_id="", version=0)
        snapshot, other = await store.source.freeze(ROLLOUT), await store.source.freeze("other")
        for snapshot_id, version in (
            ("", snapshot.version),
            (snapshot.snapshot_id.upper() + "0", snapshot.version),
            (other.snapshot_id, other.version),
            (snapshot.snapshot_id, snapshot.version + 1),
            (snapshot.snapshot_id, snapshot.version - 1),
        ):
            assert not await store.source.drop(ROLLOUT, snapshot_id=snapshot_id, version=version)
        assert not await store.source.drop("unknown", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        assert await store.source.freeze(ROLLOUT) == snapshot

    @scenario
    async def test_a_version_that_no_freeze_gave_drops_nothing(self, store: OpenedStore) -> None:
        await store.sink.put(make_entry("call"))
        snapshot = await store.source.freeze(ROLLOUT)
        await store.sink.mark_incomplete(ROLLOUT)
        for version in range(snapshot.version + 1, snapshot.version + 4):
            assert not await store.source.drop(ROLLOUT, snapshot_id=snapshot.snapshot_id, version=version)
        assert (await store.source.freeze(ROLLOUT)).entries == snapshot.entries

    @scenario
    async def test_a_drop_repeated_is_true_only_for_the_same_snapshot(
        self, first: OpenedStore, second: OpenedStore
    ) -> None:
        await first.sink.put(make_entry("call"))
        snapshot = await first.source.freeze(ROLLOUT)
        assert await first.drop(snapshot)
        assert await second.drop(snapshot)
        assert not await second.source.drop(ROLLOUT, snapshot_id=snapshot.snapshot_id, version=snapshot.version + 1)
        assert not await second.source.drop(ROLLOUT, snapshot_id="another", version=snapshot.version)

    @scenario
    async def test_of_two_consumers_with_different_versions_one_drops(
        self, first: OpenedStore, second: OpenedStore
    ) -> None:
        await first.sink.put(make_entry("call"))
        older = await first.source.freeze(ROLLOUT)
        await first.sink.mark_incomplete(ROLLOUT)
        newer = await second.source.freeze(ROLLOUT)
        dropped = await asyncio.gather(first.drop(older), second.drop(newer))
        assert list(dropped) == [False, True]
        assert not await first.drop(older)

    @scenario
    async def test_two_consumers_may_drop_one_snapshot_at_once(self, first: OpenedStore, second: OpenedStore) -> None:
        for number in range(8):
            rollout_id = f"rollout-{number}"
            await first.sink.put(make_entry("call", rollout_id=rollout_id))
            snapshot = await first.source.freeze(rollout_id)
            assert all(await asyncio.gather(first.drop(snapshot), second.drop(snapshot)))
            with pytest.raises(RolloutRetiredError):
                await first.source.freeze(rollout_id)

    @scenario
    async def test_a_retired_rollout_refuses_everything(self, first: OpenedStore, second: OpenedStore) -> None:
        await first.sink.put(make_entry("call"))
        assert await first.drop(await first.source.freeze(ROLLOUT))
        for refused in (
            second.sink.put(make_entry("call")),
            second.sink.put(make_entry("new call")),
            second.sink.mark_incomplete(ROLLOUT, "", reasons.CAPTURE_FAILED),
            second.source.freeze(ROLLOUT),
        ):
            with pytest.raises(RolloutRetiredError, match="retired") as caught:
                await refused
            assert isinstance(caught.value, RuntimeError)
