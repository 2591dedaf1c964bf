"""Database files of released schemas, as they lie on people's disks: opened, read, gone on with."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.frozen import DELIVERED, FOLDER, MASKED, OPEN, entry, frozen
from token_id_capture import reasons
from token_id_capture.errors import RolloutRetiredError
from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore
from token_id_capture.store.file.revision import HEAD_REVISION, file_revision
from token_id_capture.store.maintain.verification import Checked, verify

REVISIONS = sorted(path.name.removesuffix(".db.gz") for path in FOLDER.iterdir())


@pytest.fixture(params=REVISIONS)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return frozen(request.param, tmp_path)


async def test_it_is_upgraded_when_it_is_opened(old: Path) -> None:
    async with TokenCaptureStore(old):
        pass
    assert file_revision(old) == HEAD_REVISION


def by_call(entries: tuple[TokenEntry, ...]) -> dict[str, TokenEntry]:
    return {one.model_call_id: one for one in entries}


async def test_every_call_reads_as_it_was_captured(old: Path) -> None:
    async with TokenCaptureStore(old) as store:
        assert by_call(await store.read_entries("open")) == by_call(OPEN)
        for calls in (MASKED, DELIVERED):
            snapshot = await store.freeze(calls[0].rollout_id)
            assert by_call(snapshot.entries) == by_call(calls)
    assert list(verify(old, Checked())) == []


async def test_what_was_stored_is_recognised_and_new_calls_continue_it(old: Path) -> None:
    async with TokenCaptureStore(old) as store:
        for call in OPEN:
            await store.put(call)
        before = len((await store.describe_rollout("open")).calls)
        continued = [*OPEN[1].prompt_token_ids, *OPEN[1].generation_token_ids, 10]
        await store.put(entry("open", "later", continued, [11]))
        calls = {call.model_call_id: call for call in (await store.describe_rollout("open")).calls}
    assert (len(calls), calls["later"].prefix_call_id) == (before + 1, "next")


async def test_the_state_of_each_rollout_is_as_it_was_left(old: Path) -> None:
    async with TokenCaptureStore(old) as store:
        open_rollout = await store.describe_rollout("open")
        assert {intent.model_call_id: intent.outcome for intent in open_rollout.intents} == {
            "lost": None,
            "refused": "refused",
        }
        masked = await store.describe_rollout("masked")
        assert [(flag.model_call_id, flag.reason, flag.detail) for flag in masked.flags] == [
            ("gone", reasons.TOKEN_COUNT_MISMATCH, "5 token ids, 12 completion tokens")
        ]
        assert (masked.summary.outcome, masked.summary.reason) == ("masked", "multiple_roots")
        assert [late.model_call_id for late in masked.late_writes] == ["late"]
        with pytest.raises(RolloutRetiredError):
            await store.put(entry("retired", "again", [1], [2]))


async def test_evidence_stays_and_what_was_delivered_can_be_dropped(old: Path) -> None:
    async with TokenCaptureStore(old) as store:
        for name, dropped in (("masked", False), ("delivered", True)):
            snapshot = await store.freeze(name)
            result = await store.drop(name, snapshot_id=snapshot.snapshot_id, version=snapshot.version)
            assert result is dropped
