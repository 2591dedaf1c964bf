"""Finished records: what is written into them, and when their capture may be deleted."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support.call_trees import call
from token_id_capture import delivery
from token_id_capture.builder import assert_prefix_contiguity
from token_id_capture.consumer import trajectories_from_source
from token_id_capture.delivery import (
    MASK_SAMPLE_KEY,
    TOKEN_CAPTURE_KEY,
    build_of_record,
    capture_build_can_retire,
    finalize_rollout_token_capture,
    record_delivery,
    retire_rollout_token_capture,
    rollout_carries_token_ids,
)
from token_id_capture.errors import RolloutFrozenError, RolloutRetiredError
from token_id_capture.protocols import TokenCaptureSnapshot
from token_id_capture.store import TokenCaptureStore

ITEMS = [{"type": "message", "role": "assistant", "content": "hello"}]


class BrokenSource:
    """Every use of it fails."""

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        raise OSError("the volume is gone")

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        raise OSError("the volume is gone")

    async def record_outcome(self, *outcome: Any) -> None:
        raise OSError("the volume is gone")

    async def close(self) -> None: ...


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[TokenCaptureStore]:
    """A store that holds the rollout 4-0, two turns of one append-only conversation."""
    async with TokenCaptureStore(tmp_path) as store:
        await store.put(call("a", [1, 2], [3, 4], rollout_id="4-0", output_items=ITEMS, token_item_index=0))
        await store.put(call("b", [1, 2, 3, 4, 9], [5], rollout_id="4-0"))
        yield store


def finished(**more: Any) -> dict[str, Any]:
    """A record as a harness and a verifier leave it."""
    record = {
        "_ng_task_index": 4,
        "_ng_rollout_index": 0,
        "reward": 0.5,
        "response": {"id": "resp_1", "model": "policy", "output": copy.deepcopy(ITEMS), "usage": {"total_tokens": 9}},
    }
    return record | more


async def outcomes(store: TokenCaptureStore) -> list[tuple[str, str]]:
    return [(one.outcome, one.reason) for one in (await store.describe_rollout("4-0")).outcomes]


async def test_only_the_output_and_the_summary_of_a_delivered_record_change(store: TokenCaptureStore) -> None:
    record = finished()
    built = await finalize_rollout_token_capture(record, store)
    assert built is not None
    assert_prefix_contiguity(record["response"])
    assert [item.get("generation_token_ids") for item in record["response"]["output"]] == [[3, 4], [5]]
    assert record["response"]["output"][0]["content"] == "hello"
    summary = record.pop(TOKEN_CAPTURE_KEY)
    assert {"rollout_id": "4-0", "n_calls": 2, "reason": "", "reasons": []}.items() <= summary.items()
    assert {key: summary[key] for key in ("snapshot_id", "version")} == built["_capture_snapshot"]
    original = finished()
    original["response"]["output"] = record["response"]["output"]
    assert record == original
    json.dumps(summary)


async def test_nothing_happens_without_a_source() -> None:
    record = finished()
    assert await finalize_rollout_token_capture(record, None) is None
    assert record == finished()
    assert await retire_rollout_token_capture("4-0", None, {}) is False


async def test_a_masked_record_keeps_its_own_output_and_says_why(
    store: TokenCaptureStore, caplog: pytest.LogCaptureFixture
) -> None:
    await store.put(call("c", [1, 2, 3, 4, 9], [6], rollout_id="4-0"))
    record = finished()
    built = await finalize_rollout_token_capture(record, store)
    assert record[MASK_SAMPLE_KEY] is True
    summary = record.pop(TOKEN_CAPTURE_KEY)
    assert (summary["reason"], summary["reasons"]) == ("unresolved_retry", ["unresolved_retry: b, c"])
    assert summary["error"].startswith("unresolved_retry: The last call was answered more than once")
    assert record == finished(mask_sample=True)
    assert "rollout 4-0 is masked: unresolved_retry" in caplog.text
    assert await outcomes(store) == [("masked", "unresolved_retry")]
    assert await retire_rollout_token_capture("4-0", store, built) is False
    assert await outcomes(store) == [("masked", "unresolved_retry")]
    assert len(await store.read_entries("4-0")) == 3


async def test_a_mask_that_the_record_brings_along_stays(store: TokenCaptureStore) -> None:
    record = finished(mask_sample=True)
    built = await finalize_rollout_token_capture(record, store)
    assert (record[MASK_SAMPLE_KEY], record[TOKEN_CAPTURE_KEY]["reason"]) == (True, "")
    assert capture_build_can_retire(built)


async def test_a_record_that_carries_token_ids_is_left_alone_and_its_capture_is_retirable(
    store: TokenCaptureStore,
) -> None:
    output = [{"type": "message", "prompt_token_ids": [1], "generation_token_ids": [7], "generation_log_probs": [-1.0]}]
    record = finished(response={"output": output}, extra=[1, 2])
    before = json.dumps(record)
    built = await finalize_rollout_token_capture(record, store)
    assert json.dumps(record) == before
    assert built is not None
    assert (built["rebuilt_response"], built[MASK_SAMPLE_KEY], built[delivery._REDUNDANT_CAPTURE_KEY]) == (
        None,
        False,
        True,
    )
    assert await outcomes(store) == []
    assert await retire_rollout_token_capture("4-0", store, built) is True
    assert await outcomes(store) == [("delivered", "")]
    with pytest.raises(RolloutRetiredError):
        await store.freeze("4-0")


@pytest.mark.parametrize("names", [{}, {"_ng_rollout_id": "../x"}, {"_ng_rollout_id": "never-seen"}])
async def test_a_record_that_carries_token_ids_and_has_no_capture_needs_nothing(
    store: TokenCaptureStore, names: dict[str, Any]
) -> None:
    record = {"response": {"output": [{"generation_token_ids": [7]}]}, **names}
    before = copy.deepcopy(record)
    assert await finalize_rollout_token_capture(record, store) is None
    assert record == before


async def test_a_redundant_capture_that_cannot_be_frozen_is_left(caplog: pytest.LogCaptureFixture) -> None:
    record = finished(response={"output": [{"generation_token_ids": [7]}]})
    assert await finalize_rollout_token_capture(record, BrokenSource()) is None
    assert "redundant capture of rollout 4-0 could not be frozen" in caplog.text


async def test_finalizing_a_record_again_changes_nothing_and_it_can_still_be_retired(store: TokenCaptureStore) -> None:
    record = finished()
    await finalize_rollout_token_capture(record, store)
    before = copy.deepcopy(record)
    again = await finalize_rollout_token_capture(record, store)
    assert record == before
    assert await retire_rollout_token_capture("4-0", store, again) is True


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ({}, "no_capture_key"),
        ({"_ng_task_index": 4}, "no_capture_key"),
        ({"_ng_rollout_id": "a/b"}, "invalid_rollout_id"),
        ({"_ng_task_index": "4", "_ng_rollout_index": 0}, "invalid_rollout_id"),
        ({"_ng_rollout_id": "never-seen"}, "nothing_recorded"),
    ],
)
async def test_a_record_whose_capture_cannot_be_found_is_masked(
    store: TokenCaptureStore, names: dict[str, Any], reason: str
) -> None:
    record = {"reward": 1.0, "response": {"output": []}, **names}
    built = await finalize_rollout_token_capture(record, store)
    assert built is not None
    assert (record[MASK_SAMPLE_KEY], record[TOKEN_CAPTURE_KEY]["reason"], built["reason"]) == (True, reason, reason)
    assert record["response"] == {"output": []}
    assert not capture_build_can_retire(built)


async def test_a_source_that_fails_masks_the_record() -> None:
    record = finished()
    built = await finalize_rollout_token_capture(record, BrokenSource())
    assert built is not None
    assert (record[MASK_SAMPLE_KEY], record[TOKEN_CAPTURE_KEY]["reason"]) == (True, "freeze_failed")


async def test_the_rollout_id_may_lie_elsewhere(store: TokenCaptureStore) -> None:
    record: dict[str, Any] = {"trial": "4-0", "response": {"output": []}}
    await finalize_rollout_token_capture(record, store, rollout_id=record["trial"])
    assert rollout_carries_token_ids(record)
    record = {"trial": "a/b"}
    built = await finalize_rollout_token_capture(record, store, rollout_id=record["trial"])
    assert built is not None
    assert built["reason"] == "invalid_rollout_id"


@pytest.mark.parametrize("response", [None, "text", {"output": None}])
async def test_a_record_without_a_usable_response_gets_one(store: TokenCaptureStore, response: Any) -> None:
    record = finished(response=response)
    await finalize_rollout_token_capture(record, store)
    assert rollout_carries_token_ids(record)


async def test_the_flat_projection_leaves_the_output_alone(store: TokenCaptureStore) -> None:
    record = finished()
    built = await finalize_rollout_token_capture(record, store, projection="trajectory")
    assert built is not None
    assert built["trajectory"].token_ids == [1, 2, 3, 4, 9, 5]
    assert record["response"] == finished()["response"]
    assert await retire_rollout_token_capture("4-0", store, built) is True


async def test_a_delivered_capture_is_gone_once_and_its_delivery_is_on_record(
    store: TokenCaptureStore, caplog: pytest.LogCaptureFixture
) -> None:
    built = await finalize_rollout_token_capture(finished(), store)
    assert await outcomes(store) == []
    assert await retire_rollout_token_capture("4-0", store, built) is True
    assert await outcomes(store) == [("delivered", "")]
    assert await retire_rollout_token_capture("4-0", store, built) is True
    assert caplog.records == []
    with pytest.raises(RolloutRetiredError):
        await store.put(call("late", [1], [2], rollout_id="4-0"))


async def test_two_that_retire_at_once_are_both_told_the_truth(store: TokenCaptureStore) -> None:
    built = await finalize_rollout_token_capture(finished(), store)
    told = await asyncio.gather(*(retire_rollout_token_capture("4-0", store, built) for _ in range(2)))
    assert told == [True, True]


async def test_a_mark_that_came_after_the_build_keeps_the_capture(store: TokenCaptureStore) -> None:
    built = await finalize_rollout_token_capture(finished(), store)
    await store.mark_incomplete("4-0", "c", "lost_stream")
    assert await retire_rollout_token_capture("4-0", store, built) is False
    assert len(await store.read_entries("4-0")) == 2
    late = await trajectories_from_source("4-0", store)
    assert late["reason"] == "capture_incomplete"
    assert late["_capture_snapshot"]["version"] > built["_capture_snapshot"]["version"]  # type: ignore[index]


async def test_a_late_call_is_refused_and_the_capture_still_retires(store: TokenCaptureStore) -> None:
    built = await finalize_rollout_token_capture(finished(), store)
    with pytest.raises(RolloutFrozenError):
        await store.put(call("late", [1], [2], rollout_id="4-0"))
    assert await retire_rollout_token_capture("4-0", store, built) is True


async def test_a_build_of_another_rollout_retires_nothing(store: TokenCaptureStore) -> None:
    built = await finalize_rollout_token_capture(finished(), store)
    assert await retire_rollout_token_capture("4-1", store, built) is False
    assert len(await store.read_entries("4-0")) == 2


async def test_a_retirement_that_fails_is_logged(store: TokenCaptureStore, caplog: pytest.LogCaptureFixture) -> None:
    built = await finalize_rollout_token_capture(finished(), store)
    assert await retire_rollout_token_capture("4-0", BrokenSource(), built) is False
    assert "rollout 4-0 was not retired: the volume is gone" in caplog.text


async def test_a_delivery_can_be_recorded_without_deleting_the_capture(store: TokenCaptureStore) -> None:
    built = await trajectories_from_source("4-0", store)
    assert await record_delivery(store, built) is True
    assert await outcomes(store) == [("delivered", "")]
    assert len(await store.read_entries("4-0")) == 2
    assert await record_delivery(BrokenSource(), built) is False
    assert await record_delivery(store, {**built, "mask_sample": True}) is False


async def test_an_interrupted_batch_retires_what_its_records_say_they_delivered(store: TokenCaptureStore) -> None:
    record = finished()
    await finalize_rollout_token_capture(record, store)
    row = json.loads(json.dumps(record))
    built = build_of_record(row)
    assert built is not None
    assert await retire_rollout_token_capture("4-0", store, built) is True
    assert await outcomes(store) == [("delivered", "")]


async def test_a_masked_or_unfinished_record_retires_nothing(store: TokenCaptureStore) -> None:
    assert build_of_record(finished()) is None
    await store.mark_incomplete("4-0", "c", "lost_stream")
    record = finished()
    await finalize_rollout_token_capture(record, store)
    assert record[TOKEN_CAPTURE_KEY]["snapshot_id"]
    assert build_of_record(record) is None


@pytest.mark.parametrize(
    "built",
    [
        None,
        {},
        {"mask_sample": True, "rebuilt_response": {}, "_capture_snapshot": {"snapshot_id": "s", "version": 1}},
        {"mask_sample": False, "rebuilt_response": {}},
        {"mask_sample": False, "rebuilt_response": {}, "_capture_snapshot": {"snapshot_id": "", "version": 0}},
        {"mask_sample": False, "rebuilt_response": None, "_capture_snapshot": {"snapshot_id": "s", "version": 1}},
    ],
)
def test_a_build_without_proof_cannot_retire(built: dict[str, Any] | None) -> None:
    assert not capture_build_can_retire(built)


@pytest.mark.parametrize(
    "response",
    [None, "text", [], {}, {"output": "text"}, {"output": [None, "x", {"generation_token_ids": []}]}],
)
def test_records_without_token_ids_are_told_apart(response: Any) -> None:
    assert not rollout_carries_token_ids({"response": response})
    assert rollout_carries_token_ids({"response": {"output": [None, {"generation_token_ids": [1]}]}})
