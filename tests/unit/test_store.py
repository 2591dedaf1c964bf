"""What TokenCaptureStore does beyond the contract suite: storage form, audit trail, edges."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.opened import call, change, rows
from token_id_capture.errors import (
    ConflictingEntryError,
    CorruptCaptureError,
    InvalidEntryError,
    RolloutFrozenError,
    RolloutRetiredError,
    UnknownRolloutError,
)
from token_id_capture.store import TokenCaptureStore


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[TokenCaptureStore]:
    async with TokenCaptureStore(tmp_path / "captures.db") as opened:
        yield opened


async def test_a_prompt_that_continues_a_call_is_stored_without_the_part_it_continues(store: TokenCaptureStore) -> None:
    await store.put(call("a", [1, 2, 3], [4, 5]))
    await store.put(call("b", [1, 2, 3, 4, 5, 6], [7]))
    stored = rows(store, "SELECT model_call_id, prefix_call_id, prefix_length, length(prompt_suffix) FROM entries")
    assert stored == [("a", None, 0, 12), ("b", "a", 5, 4)]
    assert [list(entry.prompt_token_ids) for entry in await store.read_entries("r")] == [[1, 2, 3], [1, 2, 3, 4, 5, 6]]


async def test_the_prefix_is_found_when_another_process_stored_the_earlier_call(store: TokenCaptureStore) -> None:
    await store.put(call("a", [1, 2, 3], [4, 5]))
    async with TokenCaptureStore(store.database) as other:
        await other.put(call("b", [1, 2, 3, 4, 5, 6], [7]))
    assert rows(store, "SELECT prefix_call_id FROM entries WHERE model_call_id = 'b'") == [("a",)]


async def test_the_longest_of_several_prefixes_is_the_one_pointed_to(store: TokenCaptureStore) -> None:
    for call_id, generation in (("a", [4]), ("b", [4, 5]), ("c", [4, 5, 9])):
        await store.put(call(call_id, [1, 2, 3], generation))
    async with TokenCaptureStore(store.database) as other:
        await other.put(call("d", [1, 2, 3, 4, 5, 6], [7]))
    assert rows(store, "SELECT prefix_call_id, prefix_length FROM entries WHERE model_call_id = 'd'") == [("b", 5)]


async def test_calls_without_a_generation_are_never_a_prefix(store: TokenCaptureStore) -> None:
    await store.put(call("a", [1, 2], []))
    await store.put(call("b", [1, 2], []))
    await store.put(call("c", [1, 2, 3], [4]))
    assert rows(store, "SELECT DISTINCT prefix_call_id FROM entries") == [(None,)]
    assert len((await store.freeze("r")).entries) == 3


async def test_a_pointer_remembered_from_before_a_delete_is_not_used(store: TokenCaptureStore) -> None:
    await store.put(call("a", [1, 2, 3], [4, 5]))
    async with TokenCaptureStore(store.database) as other:
        await other.delete(["r"])
        await other.put(call("x", [1], [2]))
    await store.put(call("b", [1, 2, 3, 4, 5, 6], [7]))
    entries = await store.read_entries("r")
    assert [entry.model_call_id for entry in entries] == ["x", "b"]
    assert list(entries[1].prompt_token_ids) == [1, 2, 3, 4, 5, 6]


async def test_a_pointer_remembered_from_before_a_delete_is_not_used_for_the_first_call_of_the_new_rollout(
    store: TokenCaptureStore,
) -> None:
    await store.put(call("a", [1, 2, 3], [4, 5]))
    async with TokenCaptureStore(store.database) as other:
        await other.delete(["r"])
    await store.put(call("b", [1, 2, 3, 4, 5, 6], [7]))
    assert rows(store, "SELECT model_call_id, prefix_call_id FROM entries") == [("b", None)]


async def test_a_branch_and_its_stem_are_read_back_whatever_the_order_of_storing(store: TokenCaptureStore) -> None:
    stem = call("stem", [1, 2], [3])
    branches = [call(f"branch{index}", [1, 2, 3, 4], [10 + index, 5]) for index in range(4)]
    leaf = call("leaf", [1, 2, 3, 4, 11, 5, 6], [7])
    for entry in (stem, *branches, leaf):
        await store.put(entry)
    assert await store.read_entries("r") == (stem, *branches, leaf)
    assert (await store.freeze("r")).entries == (stem, *branches, leaf)


async def test_all_fields_of_a_record_come_back(store: TokenCaptureStore) -> None:
    entry = call(
        "a",
        [1],
        [2],
        model="m",
        routed_experts={"layers": [[1, 2], [3]]},
        output_items=[{"type": "message", "content": "é\u2028"}],
        token_item_index=0,
        created_at=12.25,
        response_id="id",
        finish_reason="stop",
        weight_version="v1",
        sampling={"temperature": 1.0},
        log_probs_mode="raw_logprobs",
        upstream="http://10.0.0.5:8000",
        something_new=[None, {"b": 1, "a": 2}],
    )
    await store.put(entry)
    assert await store.read_entries("r") == (entry,)


async def test_an_entry_changed_past_validation_is_refused_before_anything_is_stored(store: TokenCaptureStore) -> None:
    entry = call("a", [1], [2])
    for update in (
        {"generation_log_probs": [-0.1, -0.2]},
        {"generation_token_ids": [-1]},
        {"rollout_id": "../r"},
        {"schema_version": 99},
    ):
        with pytest.raises(ValueError, match="cannot be stored"):
            await store.put(entry.model_copy(update=update))
    with pytest.raises(InvalidEntryError, match="not JSON"):
        await store.put(entry.model_copy(update={"output_items": [{"when": object()}]}))
    assert await store.list_rollouts() == []


async def test_a_changed_token_is_reported_with_the_call_that_it_belongs_to(store: TokenCaptureStore) -> None:
    await store.put(call("a", [1, 2, 3], [4, 5]))
    await store.put(call("b", [1, 2, 3, 4, 5, 6], [7]))
    change(store, "UPDATE entries SET generation = x'0800000009000000' WHERE model_call_id = 'a'")
    with pytest.raises(CorruptCaptureError, match="call 'a' of rollout 'r' is damaged"):
        await store.read_entries("r")


async def test_a_missing_prefix_is_reported_with_the_call_that_needs_it(store: TokenCaptureStore) -> None:
    await store.put(call("a", [1, 2, 3], [4, 5]))
    await store.put(call("b", [1, 2, 3, 4, 5, 6], [7]))
    change(store, "DELETE FROM entries WHERE model_call_id = 'a'")
    with pytest.raises(CorruptCaptureError, match="call 'b'"):
        await store.freeze("r")


async def test_a_record_of_a_newer_release_fails_the_whole_read(store: TokenCaptureStore) -> None:
    await store.put(call("a", [1], [2]))
    change(store, "UPDATE entries SET schema_version = 2")
    with pytest.raises(ValueError, match="upgrade token-id-capture"):
        await store.read_entries("r")


async def test_a_late_call_is_refused_and_recorded_without_touching_the_snapshot(store: TokenCaptureStore) -> None:
    await store.put(call("a", [1], [2]))
    snapshot = await store.freeze("r")
    with pytest.raises(RolloutFrozenError, match="already frozen"):
        await store.put(call("late", [1, 2], [3]))
    with pytest.raises(RolloutFrozenError):
        await store.begin_call("r", "later")
    assert await store.freeze("r") == snapshot
    assert rows(store, "SELECT rollout_id, model_call_id, state FROM late_writes") == [("r", "late", "frozen")]
    assert await store.drop("r", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    with pytest.raises(RolloutRetiredError, match="retired"):
        await store.put(call("later", [1, 2], [3]))
    assert await store.read_entries("r") == ()
    assert rows(store, "SELECT model_call_id, state FROM late_writes ORDER BY 1") == [
        ("late", "frozen"),
        ("later", "retired"),
    ]


async def test_a_call_that_began_before_its_rollout_was_deleted_does_not_join_the_next_attempt(
    store: TokenCaptureStore,
) -> None:
    await store.begin_call("r", "first-attempt")
    async with TokenCaptureStore(store.database) as launcher:
        await launcher.delete(["r"])
        await launcher.begin_call("r", "second-attempt")
    with pytest.raises(RolloutRetiredError, match="begun before its delete"):
        await store.put(call("first-attempt", [1], [2]))
    assert await store.read_entries("r") == ()
    assert rows(store, "SELECT model_call_id, state FROM late_writes") == [("first-attempt", "deleted")]


async def test_the_flag_of_a_conflict_is_committed_before_the_exception(store: TokenCaptureStore) -> None:
    await store.put(call("a", [1], [2]))
    with pytest.raises(ConflictingEntryError, match="reused with a different payload"):
        await store.put(call("a", [1], [3]))
    assert rows(store, "SELECT model_call_id, reason FROM incomplete_flags") == [("a", "conflicting_payload")]
    snapshot = await store.freeze("r")
    assert snapshot.incomplete
    assert [list(entry.generation_token_ids) for entry in snapshot.entries] == [[2]]


async def test_conflicting_puts_in_one_group_store_the_first_and_refuse_the_second(store: TokenCaptureStore) -> None:
    results = await asyncio.gather(
        *(store.put(call("a", [1], [token])) for token in range(2, 10)), return_exceptions=True
    )
    assert [type(result) for result in results].count(ConflictingEntryError) == 7
    assert len(await store.read_entries("r")) == 1


async def test_a_snapshot_names_the_calls_that_were_lost_and_their_process(store: TokenCaptureStore) -> None:
    await store.put(call("a", [1], [2]))
    await store.begin_call("r", "lost")
    snapshot = await store.freeze("r")
    assert snapshot.incomplete
    [(call_id, reason, detail)] = rows(store, "SELECT model_call_id, reason, detail FROM snapshot_flags")
    assert (call_id, reason) == ("lost", "call_lost")
    assert str(os.getpid()) in detail
    assert rows(store, "SELECT rollout_id, model_call_id, pid FROM lost_calls") == [("r", "lost", os.getpid())]


async def test_a_refused_call_leaves_the_rollout_complete_and_stays_visible(store: TokenCaptureStore) -> None:
    await store.put(call("a", [1], [2]))
    await store.begin_call("r", "refused")
    await store.refuse_call("r", "refused", "400 context too long")
    assert not (await store.freeze("r")).incomplete
    [intent] = (await store.describe_rollout("r")).intents
    assert (intent.outcome, intent.detail) == ("refused", "400 context too long")


async def test_reasons_are_kept_apart_from_their_particulars(store: TokenCaptureStore) -> None:
    await store.mark_incomplete("r", "a", "token_count_mismatch: 5 token ids, 12 completion tokens")
    await store.mark_incomplete("r")
    assert rows(store, "SELECT reason, detail FROM incomplete_flags ORDER BY flag_id") == [
        ("token_count_mismatch", "5 token ids, 12 completion tokens"),
        ("unspecified", ""),
    ]


async def test_masked_evidence_is_kept_until_an_administrator_retires_it_with_an_audit_trail(
    store: TokenCaptureStore,
) -> None:
    await store.put(call("a", [1], [2]))
    snapshot = await store.freeze("r")
    await store.record_outcome(snapshot.snapshot_id, snapshot.version, "masked", "multiple_roots", {"roots": 2})
    assert not await store.drop("r", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    assert rows(store, "SELECT rollout_id, outcome, reason FROM kept_evidence") == [("r", "masked", "multiple_roots")]
    assert await store.retire(["r"]) == {"removed": ["r"], "absent": []}
    assert await store.retire(["r"]) == {"removed": [], "absent": ["r"]}
    assert rows(store, "SELECT count(*) FROM snapshots") == [(0,)]
    outcomes = rows(store, "SELECT outcome, reason FROM build_outcomes ORDER BY outcome_id")
    assert outcomes == [("masked", "multiple_roots"), ("released", "retired_by_hand")]
    assert not await store.drop("r", snapshot_id=snapshot.snapshot_id, version=snapshot.version)


async def test_an_outcome_of_an_unknown_snapshot_or_name_is_refused(store: TokenCaptureStore) -> None:
    with pytest.raises(UnknownRolloutError):
        await store.record_outcome("nothing", 1, "masked")
    with pytest.raises(ValueError, match="unknown outcome"):
        await store.record_outcome("nothing", 1, "released")


async def test_retire_and_delete_check_the_whole_batch_before_they_change_anything(store: TokenCaptureStore) -> None:
    await store.put(call("a", [1], [2]))
    for method in (store.retire, store.delete):
        with pytest.raises(ValueError, match="invalid rollout id"):
            await method(["r", "../r"])
        with pytest.raises(TypeError):
            await method("r")
    assert len(await store.read_entries("r")) == 1
    assert await store.delete(["r", "unknown"]) == {"removed": ["r"], "absent": ["unknown"]}


async def test_only_old_tombstones_are_swept(store: TokenCaptureStore) -> None:
    for rollout_id in ("old", "recent", "live"):
        await store.put(call("a", [1], [2], rollout_id))
    for rollout_id in ("old", "recent"):
        snapshot = await store.freeze(rollout_id)
        assert await store.drop(rollout_id, snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    change(store, "UPDATE rollouts SET retired_at = retired_at - 3600 WHERE rollout_id = 'old'")
    assert await store.sweep_retired(600) == 1
    assert [summary.rollout_id for summary in await store.list_rollouts()] == ["live", "recent"]


async def test_an_outcome_of_an_earlier_use_of_an_id_is_not_shown_for_the_next(store: TokenCaptureStore) -> None:
    await store.put(call("a", [1], [2]))
    snapshot = await store.freeze("r")
    await store.record_outcome(snapshot.snapshot_id, snapshot.version, "delivered")
    await store.delete(["r"])
    await store.put(call("a", [1], [2]))
    [summary] = await store.list_rollouts()
    assert summary.outcome is None
    assert rows(store, "SELECT latest_outcome FROM rollout_overview") == [(None,)]


async def test_pages_of_rollouts_follow_each_other_without_gap_or_repeat(store: TokenCaptureStore) -> None:
    names = sorted(f"r{index}" for index in range(25))
    await asyncio.gather(*(store.put(call("a", [1], [2], name)) for name in names))
    seen: list[str] = []
    while page := await store.list_rollouts(after=seen[-1] if seen else "", limit=7):
        seen += [summary.rollout_id for summary in page]
    assert seen == names


async def test_the_tokens_of_a_call_are_readable_in_plain_sql(store: TokenCaptureStore) -> None:
    prompt, generation = [0, 1, 255, 256, 65_536, 4_294_967_295], [151_643, 7]
    await store.put(call("a", prompt, generation))
    decoded = rows(
        store, "SELECT part, position, token_id FROM call_tokens WHERE model_call_id = 'a' ORDER BY position"
    )
    assert [token for _, _, token in decoded] == prompt + generation
    assert [part for part, _, _ in decoded] == ["prompt"] * 6 + ["generation"] * 2
