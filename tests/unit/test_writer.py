"""One thread writes for many callers: what each of them gets, whatever happens to the others."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from token_id_capture.errors import (
    ConflictingEntryError,
    RolloutRetiredError,
    StorageFullError,
    StoreClosedError,
    StoreError,
)
from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore
from token_id_capture.store.codec import pack
from token_id_capture.store.write.queue import Batch, Job
from token_id_capture.store.write.writer import Writer


def entry(model_call_id: str, tokens: int = 4, rollout_id: str = "first") -> TokenEntry:
    return TokenEntry(
        rollout_id=rollout_id,
        model_call_id=model_call_id,
        prompt_token_ids=range(tokens),
        generation_token_ids=range(tokens),
        generation_log_probs=[-0.5] * tokens,
    )


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[TokenCaptureStore]:
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        yield store


async def _stored(store: TokenCaptureStore, rollout_id: str = "first") -> list[str]:
    return [stored.model_call_id for stored in await store.read_entries(rollout_id)]


async def test_puts_that_are_cancelled_are_stored_or_not_and_never_half(store: TokenCaptureStore) -> None:
    dice = random.Random(7)
    tasks = {}
    for number in range(400):
        tasks[str(number)] = asyncio.create_task(store.put(entry(str(number), 200)))
        if dice.random() < 0.1:
            await asyncio.sleep(0)
    cancelled = set(dice.sample(sorted(tasks), 200))
    for call in cancelled:
        if dice.random() < 0.1:
            await asyncio.sleep(0.001)
        tasks[call].cancel()
    results = dict(zip(tasks, await asyncio.gather(*tasks.values(), return_exceptions=True), strict=True))
    assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results.values())
    await store.put(entry("after"))
    stored = await store.read_entries("first")
    assert {call for call, result in results.items() if result is None} <= {call.model_call_id for call in stored}
    for kept in stored[:-1]:
        assert kept == entry(kept.model_call_id, 200)
    # A caller that was cancelled may ask again, whether its call was stored or not.
    await asyncio.gather(*(store.put(entry(call, 200)) for call in tasks))
    assert set(await _stored(store)) == {*tasks, "after"}


async def test_callers_beyond_the_bound_of_the_queue_wait_their_turn_in_order(tmp_path: Path) -> None:
    store = TokenCaptureStore(tmp_path / "captures.db")
    store._backend.limits = dataclasses.replace(store._backend.limits, queue_bytes=20_000)
    most_held = 0

    async def watch() -> None:
        nonlocal most_held
        while True:
            most_held = max(most_held, store._backend.live_writer()._queue.held)
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(store.put(entry(str(number), 300)) for number in range(300)))
    watching.cancel()
    assert await _stored(store) == [str(number) for number in range(300)]
    assert 0 < most_held <= 20_000
    await store.close()


async def test_a_call_larger_than_the_queue_is_stored_all_the_same(tmp_path: Path) -> None:
    store = TokenCaptureStore(tmp_path / "captures.db")
    store._backend.limits = dataclasses.replace(store._backend.limits, queue_bytes=1_000)
    await asyncio.gather(*(store.put(entry(str(number), 2_000)) for number in range(5)))
    assert len(await _stored(store)) == 5
    await store.close()


async def test_a_cancelled_caller_that_waited_for_room_leaves_no_trace(tmp_path: Path) -> None:
    store = TokenCaptureStore(tmp_path / "captures.db")
    store._backend.limits = dataclasses.replace(store._backend.limits, queue_bytes=3_000)
    puts = [asyncio.create_task(store.put(entry(str(number), 300))) for number in range(50)]
    await asyncio.sleep(0)
    for put in puts[25:]:
        put.cancel()
    await asyncio.gather(*puts, return_exceptions=True)
    assert await _stored(store) == [str(number) for number in range(25)]
    await store.close()


async def test_closing_finishes_all_that_was_asked_for_before(tmp_path: Path) -> None:
    store = TokenCaptureStore(tmp_path / "captures.db")
    store._backend.limits = dataclasses.replace(store._backend.limits, queue_bytes=50_000)
    puts = [asyncio.create_task(store.put(entry(str(number), 300))) for number in range(200)]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*puts)
    with pytest.raises(StoreClosedError):
        await store.put(entry("after"))
    async with TokenCaptureStore(tmp_path / "captures.db") as reopened:
        assert await _stored(reopened) == [str(number) for number in range(200)]


async def test_a_row_that_fails_does_not_fail_its_neighbours(store: TokenCaptureStore) -> None:
    with closing(sqlite3.connect(store.database)) as connection:
        connection.execute(
            "CREATE TRIGGER refuse BEFORE INSERT ON entries WHEN NEW.model_call_id = '33' "
            "BEGIN SELECT RAISE(ABORT, 'not this one'); END"
        )
    calls = [str(number) for number in range(100)]
    results = await asyncio.gather(*(store.put(entry(call)) for call in calls), return_exceptions=True)
    failed = {call: result for call, result in zip(calls, results, strict=True) if result is not None}
    assert list(failed) == ["33"]
    assert isinstance(failed["33"], StoreError)
    assert "not this one" in str(failed["33"])
    assert set(await _stored(store)) == set(calls) - {"33"}


async def test_a_conflict_with_a_call_of_its_own_group_undoes_none_of_it(
    store: TokenCaptureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    undone: list[BaseException] = []
    commit = Writer._commit

    def watched(writer: Writer, group: list[Job]) -> None:
        try:
            commit(writer, group)
        except Exception as error:
            undone.append(error)
            raise

    monkeypatch.setattr(Writer, "_commit", watched)
    asked = await asyncio.gather(
        store.put(entry("a")), store.put(entry("a", 5)), store.put(entry("b")), return_exceptions=True
    )
    assert [type(result) for result in asked] == [type(None), ConflictingEntryError, type(None)]
    assert undone == []
    assert (await store.describe_rollout("first")).summary.version == 1


async def test_a_row_that_fails_beside_an_input_output_error_does_not_fail_its_neighbours(
    store: TokenCaptureStore,
) -> None:
    errors = [sqlite3.OperationalError("disk I/O error")]
    errors[0].sqlite_errorname = "SQLITE_IOERR_WRITE"

    def fails_once(batch: Batch, jobs: list[Job]) -> None:
        if errors:
            raise errors.pop()

    await store.open()
    writer = store._backend.live_writer()
    asked = await asyncio.gather(
        writer.submit(fails_once, None),
        store.put(entry("a")),
        store.mark_incomplete("first", "no text: \udc80", "lost_stream"),
        store.put(entry("b")),
        return_exceptions=True,
    )
    assert [type(result) for result in asked] == [type(None), type(None), UnicodeEncodeError, type(None)]
    assert writer.alive
    assert await _stored(store) == ["a", "b"]


async def test_different_operations_of_one_group_happen_in_the_order_in_which_they_were_asked_for(
    store: TokenCaptureStore,
) -> None:
    asked = await asyncio.gather(
        store.begin_call("first", "a"),
        store.put(entry("a")),
        store.put(entry("b")),
        store.freeze("first"),
        store.mark_incomplete("first", reason="lost_stream"),
        store.freeze("first"),
    )
    before, after = asked[3], asked[5]
    assert [stored.model_call_id for stored in before.entries] == ["a", "b"]
    assert (before.incomplete, after.incomplete) == (False, True)
    assert after.version == before.version + 1


async def test_a_put_that_failed_is_still_refused_when_it_is_tried_again_after_a_delete(tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path / "captures.db", max_bytes=400_000) as store:
        await store.begin_call("first", "late")
        with pytest.raises(StorageFullError):
            await store.put(entry("late", 100_000))
        await store.delete(["first"])
        await store.put(entry("of the second attempt"))
        with pytest.raises(RolloutRetiredError):
            await store.put(entry("late"))
        assert await _stored(store) == ["of the second attempt"]


async def test_a_refused_call_that_begins_again_is_open_again(store: TokenCaptureStore) -> None:
    await store.begin_call("first", "a")
    await store.refuse_call("first", "a", "busy")
    await store.begin_call("first", "a")
    assert (await store.freeze("first")).incomplete


async def test_a_repeated_put_ends_the_call_that_began_again(store: TokenCaptureStore) -> None:
    await store.begin_call("first", "a")
    await store.put(entry("a"))
    await store.begin_call("first", "a")
    await store.put(entry("a"))
    assert not (await store.freeze("first")).incomplete


async def test_a_repeated_put_after_the_freeze_leaves_the_evidence_as_it_is(store: TokenCaptureStore) -> None:
    await store.put(entry("a"))
    await store.begin_call("first", "a")
    frozen = await store.freeze("first")
    assert frozen.incomplete
    await store.put(entry("a"))
    assert [intent.model_call_id for intent in (await store.describe_rollout("first")).intents] == ["a"]
    assert await store.freeze("first") == frozen


async def test_a_call_counts_in_the_queue_with_its_content() -> None:
    more = {"output_items": [{"text": "x" * 2_000_000}], "routed_experts": list(range(100_000)), "more": "y" * 500_000}
    assert pack(entry("large").model_copy(update=more)).size > 2_600_000
