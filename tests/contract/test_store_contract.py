"""The store keeps what the protocols promise, and the suite that says so notices a broken one."""

from __future__ import annotations

import random
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from token_id_capture.protocols import TokenCaptureSnapshot, TokenSink, TokenSource
from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore
from token_id_capture.testing.contract import CaptureContract
from token_id_capture.testing.memory_store import MemoryRollout, MemoryStore
from token_id_capture.tokens import LogProbs


class TestTokenCaptureStore(CaptureContract):
    @asynccontextmanager
    async def open_store(self, directory: Path) -> AsyncIterator[tuple[TokenSink, TokenSource]]:
        async with TokenCaptureStore(directory) as store:
            yield store, store


class TestPostgres(CaptureContract):
    databases: ClassVar[dict[Path, str]] = {}

    @pytest.fixture(autouse=True)
    def _database(self, tmp_path: Path, postgres_url: str) -> None:
        self.databases[tmp_path] = postgres_url

    @asynccontextmanager
    async def open_store(self, directory: Path) -> AsyncIterator[tuple[TokenSink, TokenSource]]:
        async with TokenCaptureStore(self.databases[directory]) as store:
            yield store, store


class TestMemoryStore(CaptureContract):
    kind: type[MemoryStore] = MemoryStore
    disks: ClassVar[dict[Path, dict[str, MemoryRollout]]] = {}

    @asynccontextmanager
    async def open_store(self, directory: Path) -> AsyncIterator[tuple[TokenSink, TokenSource]]:
        store = self.kind(self.disks.setdefault(directory, {}))
        yield store, store


class Overwrites(MemoryStore):
    async def put(self, entry: TokenEntry) -> None:
        self.live(entry.rollout_id, "put").entries.pop(entry.model_call_id, None)
        await super().put(entry)


class RefusesConflictsSilently(MemoryStore):
    async def put(self, entry: TokenEntry) -> None:
        marks = self.live(entry.rollout_id, "put").marks
        try:
            await super().put(entry)
        finally:
            self.rollouts[entry.rollout_id].marks = marks


class IgnoresTimestamps(MemoryStore):
    async def put(self, entry: TokenEntry) -> None:
        await super().put(entry.model_copy(update={"created_at": 0.0}))


class LosesExtras(MemoryStore):
    async def put(self, entry: TokenEntry) -> None:
        known = {name: getattr(entry, name) for name in TokenEntry.model_fields}
        await super().put(TokenEntry(**known))


class RoundsLogProbs(MemoryStore):
    async def put(self, entry: TokenEntry) -> None:
        rounded = LogProbs(array("d", array("f", [max(value, -1e38) for value in entry.generation_log_probs])))
        await super().put(entry.model_copy(update={"generation_log_probs": rounded}))


class AcceptsLateCalls(MemoryStore):
    async def put(self, entry: TokenEntry) -> None:
        rollout = self.live(entry.rollout_id, "put")
        frozen_id, rollout.frozen_id = rollout.frozen_id, ""
        try:
            await super().put(entry)
        finally:
            rollout.frozen_id = frozen_id


class KeepsIntentsOpen(MemoryStore):
    async def put(self, entry: TokenEntry) -> None:
        intents = set(self.live(entry.rollout_id, "put").intents)
        await super().put(entry)
        self.rollouts[entry.rollout_id].intents = intents


class ForgetsIntents(MemoryStore):
    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        await super().begin_call(rollout_id, model_call_id)
        self.rollouts[rollout_id].intents.clear()


class BeginsLateCalls(MemoryStore):
    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        self.live(rollout_id, "begin_call").intents.add(model_call_id)


class CountsRefusalsAsHoles(MemoryStore):
    async def refuse_call(self, rollout_id: str, model_call_id: str, detail: str = "") -> None:
        pass


class FencesUnknownRollouts(MemoryStore):
    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        self.live(rollout_id, "freeze")
        return await super().freeze(rollout_id)


class FreezesAnew(MemoryStore):
    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        if rollout_id in self.rollouts:
            self.rollouts[rollout_id].frozen_id = f"snapshot {random.random()}"
        return await super().freeze(rollout_id)


class SortsEntries(MemoryStore):
    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        snapshot = await super().freeze(rollout_id)
        return replace(snapshot, entries=tuple(sorted(snapshot.entries, key=lambda entry: entry.model_call_id)))


class SwallowsLateMarks(MemoryStore):
    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "", reason: str = "") -> None:
        if not self.live(rollout_id, "mark_incomplete").frozen_id:
            await super().mark_incomplete(rollout_id, model_call_id, reason)


class MarksOnce(MemoryStore):
    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "", reason: str = "") -> None:
        self.live(rollout_id, "mark_incomplete").marks = 1


class DropsAnyVersion(MemoryStore):
    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        rollout = self.rollouts.get(rollout_id, MemoryRollout())
        return await super().drop(rollout_id, snapshot_id=snapshot_id, version=rollout.marks)


class DropsAVersionThatNoFreezeGave(MemoryStore):
    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        self.rollouts.get(rollout_id, MemoryRollout()).frozen_version = version
        return await super().drop(rollout_id, snapshot_id=snapshot_id, version=version)


class DropsAnySnapshot(MemoryStore):
    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        rollout = self.rollouts.get(rollout_id, MemoryRollout())
        return await super().drop(rollout_id, snapshot_id=rollout.frozen_id, version=version)


class DropsOnlyOnce(MemoryStore):
    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        retired = self.rollouts.get(rollout_id, MemoryRollout()).retired
        return not retired and await super().drop(rollout_id, snapshot_id=snapshot_id, version=version)


class LeavesNoTombstone(MemoryStore):
    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        dropped = await super().drop(rollout_id, snapshot_id=snapshot_id, version=version)
        if dropped:
            del self.rollouts[rollout_id]
        return dropped


class IgnoresOutcomes(MemoryStore):
    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        self.rollouts.get(rollout_id, MemoryRollout()).outcome = ""
        return await super().drop(rollout_id, snapshot_id=snapshot_id, version=version)


class RemembersTheFirstOutcome(MemoryStore):
    async def record_outcome(self, snapshot_id: str, version: int, outcome: str, *rest: Any) -> None:
        recorded = [rollout.outcome for rollout in self.rollouts.values() if rollout.frozen_id == snapshot_id]
        await super().record_outcome(snapshot_id, version, (recorded and recorded[0]) or outcome, *rest)


class DeletesOnlyEntries(MemoryStore):
    async def delete(self, rollout_ids: list[str]) -> None:
        for rollout_id in rollout_ids:
            self.rollouts[rollout_id].entries.clear()


class KeepsToItself(MemoryStore):
    def __init__(self, rollouts: dict[str, MemoryRollout]) -> None:
        super().__init__({})


BROKEN = {
    Overwrites: "another_payload_under_a_known_call_id_is_refused",
    RefusesConflictsSilently: "another_payload_under_a_known_call_id_is_refused",
    IgnoresTimestamps: "another_payload_under_a_known_call_id_is_refused",
    LosesExtras: "entries_come_back_exactly_as_they_were_put",
    RoundsLogProbs: "entries_come_back_exactly_as_they_were_put",
    AcceptsLateCalls: "a_late_call_changes_nothing_and_does_not_come_back",
    KeepsIntentsOpen: "a_put_ends_the_intent_of_its_call",
    ForgetsIntents: "a_call_that_never_ended_makes_the_rollout_incomplete",
    BeginsLateCalls: "no_call_begins_after_a_freeze_or_a_retirement",
    CountsRefusalsAsHoles: "a_refused_call_is_no_hole",
    FencesUnknownRollouts: "a_rollout_that_nobody_has_seen_is_empty_and_not_fenced",
    FreezesAnew: "freezing_again_gives_the_same_snapshot",
    SortsEntries: "entries_come_back_exactly_as_they_were_put",
    SwallowsLateMarks: "each_mark_after_a_freeze_raises_the_version",
    MarksOnce: "each_mark_after_a_freeze_raises_the_version",
    DropsAnyVersion: "a_mark_between_freeze_and_drop_keeps_the_evidence",
    DropsAVersionThatNoFreezeGave: "a_version_that_no_freeze_gave_drops_nothing",
    DropsAnySnapshot: "a_drop_that_differs_in_anything_deletes_nothing",
    DropsOnlyOnce: "a_drop_repeated_is_true_only_for_the_same_snapshot",
    LeavesNoTombstone: "a_late_call_changes_nothing_and_does_not_come_back",
    IgnoresOutcomes: "masked_and_failed_evidence_is_not_dropped",
    RemembersTheFirstOutcome: "the_latest_outcome_counts",
    DeletesOnlyEntries: "a_second_attempt_holds_no_call_of_the_first",
    KeepsToItself: "an_acknowledged_entry_is_visible_to_others_at_once",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_the_suite_notices_a_broken_store(broken: type[MemoryStore], tmp_path: Path) -> None:
    suite = TestMemoryStore()
    suite.kind = broken
    test = getattr(suite, f"test_{BROKEN[broken]}")
    arguments = {"change": {"created_at": 1.0}} if "another_payload" in BROKEN[broken] else {}
    with pytest.raises((AssertionError, pytest.fail.Exception, RuntimeError, ValueError)):
        test(tmp_path=tmp_path, **arguments)


class BareStore:
    """A store without any extension."""

    def __init__(self, store: MemoryStore) -> None:
        self.put, self.mark_incomplete, self.close = store.put, store.mark_incomplete, store.close
        self.freeze, self.drop = store.freeze, store.drop


class BareContract(CaptureContract):
    disks: ClassVar[dict[Path, dict[str, MemoryRollout]]] = {}

    @asynccontextmanager
    async def open_store(self, directory: Path) -> AsyncIterator[tuple[TokenSink, TokenSource]]:
        store = BareStore(MemoryStore(self.disks.setdefault(directory, {})))
        yield store, store


def test_the_promises_of_a_missing_extension_are_skipped(tmp_path: Path) -> None:
    with pytest.raises(pytest.skip.Exception, match="BareStore lacks begin_call, refuse_call"):
        BareContract().test_a_refused_call_is_no_hole(tmp_path / "1")
    with pytest.raises(pytest.skip.Exception, match="BareStore lacks record_outcome"):
        BareContract().test_the_latest_outcome_counts(tmp_path / "2")
    with pytest.raises(pytest.skip.Exception, match="BareStore lacks delete"):
        BareContract().test_a_second_attempt_holds_no_call_of_the_first(tmp_path / "3")


def test_a_suite_that_opens_nothing_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="override open_store"):
        CaptureContract().test_a_mark_makes_a_rollout_incomplete(tmp_path)
