"""The optional extensions: call intents, outcomes, and ids that are used again."""

from __future__ import annotations

import contextlib

import pytest

from token_id_capture import reasons
from token_id_capture.errors import RolloutFrozenError, RolloutRetiredError, UnknownRolloutError
from token_id_capture.testing.contract.harness import (
    ROLLOUT,
    Contract,
    OpenedStore,
    assert_same_entry,
    make_entry,
    scenario,
)


class IntentContract(Contract):
    """What ``CallIntents`` promises."""

    @scenario
    async def test_a_call_that_never_ended_makes_the_rollout_incomplete(
        self, first: OpenedStore, second: OpenedStore
    ) -> None:
        await first.intents.begin_call(ROLLOUT, "lost")
        await first.sink.put(make_entry("call"))
        snapshot = await second.source.freeze(ROLLOUT)
        assert snapshot.incomplete
        assert [entry.model_call_id for entry in snapshot.entries] == ["call"]

    @scenario
    async def test_a_rollout_of_one_lost_call_is_incomplete(self, store: OpenedStore) -> None:
        await store.intents.begin_call(ROLLOUT, "lost")
        snapshot = await store.source.freeze(ROLLOUT)
        assert snapshot.incomplete
        assert snapshot.snapshot_id

    @scenario
    async def test_a_put_ends_the_intent_of_its_call(self, first: OpenedStore, second: OpenedStore) -> None:
        await first.intents.begin_call(ROLLOUT, "call")
        await second.sink.put(make_entry("call"))
        assert not (await first.source.freeze(ROLLOUT)).incomplete

    @scenario
    async def test_a_refused_call_is_no_hole(self, first: OpenedStore, second: OpenedStore) -> None:
        await first.intents.begin_call(ROLLOUT, "refused")
        await second.intents.refuse_call(ROLLOUT, "refused", "HTTP 400")
        await first.sink.put(make_entry("call"))
        snapshot = await first.source.freeze(ROLLOUT)
        assert not snapshot.incomplete
        assert len(snapshot.entries) == 1

    @scenario
    async def test_a_refusal_comes_too_late_after_the_freeze(self, first: OpenedStore, second: OpenedStore) -> None:
        await first.intents.begin_call(ROLLOUT, "call")
        assert (await first.source.freeze(ROLLOUT)).incomplete
        with pytest.raises(RolloutFrozenError):
            await second.intents.refuse_call(ROLLOUT, "call", "HTTP 400")
        assert (await second.source.freeze(ROLLOUT)).incomplete

    @scenario
    async def test_a_refusal_leaves_ended_and_unknown_calls_as_they_are(self, store: OpenedStore) -> None:
        await store.intents.begin_call(ROLLOUT, "call")
        await store.sink.put(make_entry("call"))
        await store.intents.refuse_call(ROLLOUT, "call")
        await store.intents.refuse_call(ROLLOUT, "never begun")
        snapshot = await store.source.freeze(ROLLOUT)
        assert [entry.model_call_id for entry in snapshot.entries] == ["call"]
        assert not snapshot.incomplete

    @scenario
    async def test_no_call_begins_after_a_freeze_or_a_retirement(self, first: OpenedStore, second: OpenedStore) -> None:
        await first.sink.put(make_entry("call"))
        snapshot = await first.source.freeze(ROLLOUT)
        with pytest.raises(RolloutFrozenError):
            await second.intents.begin_call(ROLLOUT, "late")
        assert await first.source.freeze(ROLLOUT) == snapshot
        assert await first.drop(snapshot)
        with pytest.raises(RolloutRetiredError):
            await second.intents.begin_call(ROLLOUT, "later still")


class OutcomeContract(Contract):
    """What ``OutcomeRecorder`` promises."""

    @scenario
    async def test_masked_and_failed_evidence_is_not_dropped(self, first: OpenedStore, second: OpenedStore) -> None:
        for outcome in ("masked", "failed"):
            await first.sink.put(make_entry("call", rollout_id=outcome))
            snapshot = await first.source.freeze(outcome)
            await first.outcomes.record_outcome(
                snapshot.snapshot_id, snapshot.version, outcome, reasons.BUILD_FAILED, {"n_calls": 1}
            )
            assert not await second.drop(snapshot)
            assert (await second.source.freeze(outcome)) == snapshot

    @scenario
    async def test_the_latest_outcome_counts(self, store: OpenedStore) -> None:
        await store.sink.put(make_entry("call"))
        snapshot = await store.source.freeze(ROLLOUT)
        for outcome, droppable in (("masked", False), ("delivered", True), ("failed", False), ("delivered", True)):
            await store.outcomes.record_outcome(snapshot.snapshot_id, snapshot.version, outcome)
            if not droppable:
                assert not await store.drop(snapshot)
        assert await store.drop(snapshot)

    @scenario
    async def test_an_outcome_of_an_older_version_takes_nothing_back(self, store: OpenedStore) -> None:
        await store.sink.put(make_entry("call"))
        older = await store.source.freeze(ROLLOUT)
        await store.sink.mark_incomplete(ROLLOUT, "call", reasons.CAPTURE_FAILED)
        newer = await store.source.freeze(ROLLOUT)
        await store.outcomes.record_outcome(newer.snapshot_id, newer.version, "masked")
        with contextlib.suppress(UnknownRolloutError):  # who keeps only the newest version may say so
            await store.outcomes.record_outcome(older.snapshot_id, older.version, "delivered")
        assert not await store.drop(older)
        assert not await store.drop(newer)

    @scenario
    async def test_an_outcome_must_be_a_known_one_of_a_known_snapshot(self, store: OpenedStore) -> None:
        await store.sink.put(make_entry("call"))
        snapshot = await store.source.freeze(ROLLOUT)
        with pytest.raises(ValueError, match="splendid"):
            await store.outcomes.record_outcome(snapshot.snapshot_id, snapshot.version, "splendid")
        for snapshot_id, version in ((snapshot.snapshot_id, snapshot.version + 1), ("unknown", snapshot.version)):
            with pytest.raises(UnknownRolloutError):
                await store.outcomes.record_outcome(snapshot_id, version, "delivered")


class ReuseContract(Contract):
    """What ``delete`` promises, where a source has it."""

    @scenario
    async def test_a_second_attempt_holds_no_call_of_the_first(self, first: OpenedStore, second: OpenedStore) -> None:
        await first.sink.put(make_entry("first attempt"))
        await first.sink.mark_incomplete(ROLLOUT)
        stale = await first.source.freeze(ROLLOUT)
        await second.delete(ROLLOUT)
        await first.sink.put(make_entry("second attempt", [1, 2, 3, 4, 5, 6, 7]))
        snapshot = await second.source.freeze(ROLLOUT)
        (only,) = snapshot.entries
        assert_same_entry(only, make_entry("second attempt", [1, 2, 3, 4, 5, 6, 7]))
        assert not snapshot.incomplete
        assert not await first.drop(stale)

    @scenario
    async def test_a_retired_id_can_be_used_again_once_it_is_deleted(self, store: OpenedStore) -> None:
        await store.sink.put(make_entry("call"))
        assert await store.drop(await store.source.freeze(ROLLOUT))
        await store.delete(ROLLOUT)
        assert (await store.source.freeze(ROLLOUT)).entries == ()
        await store.sink.put(make_entry("call", model="second attempt"))
        assert [entry.model for entry in (await store.source.freeze(ROLLOUT)).entries] == ["second attempt"]
