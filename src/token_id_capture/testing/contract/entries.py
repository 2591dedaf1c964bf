"""Entries: durable, exact, and one payload a call."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from token_id_capture import reasons
from token_id_capture.errors import ConflictingEntryError
from token_id_capture.testing.contract.harness import (
    ROLLOUT,
    Contract,
    OpenedStore,
    assert_same_entry,
    make_entry,
    scenario,
)


class EntryContract(Contract):
    """What ``TokenSink.put`` promises."""

    @scenario
    async def test_entries_come_back_exactly_as_they_were_put(self, store: OpenedStore) -> None:
        entries = [
            make_entry("plain"),
            make_entry(
                "extremes",
                [0, 2**32 - 1, 7],
                generation_token_ids=[2**32 - 1, 0, 1, 2],
                generation_log_probs=[-0.0, -5e-324, -1.7976931348623157e308, -0.1],
                created_at=1700000000.0000002,
            ),
            make_entry("empty", generation_token_ids=[], generation_log_probs=[]),
            make_entry(
                "everything",
                model="größe/模型",
                routed_experts={"data": "AAEC", "shape": [3, 1]},
                output_items=[{"type": "function_call", "arguments": '{ "city" :\n"Zürich"}', "n": None, "x": 0.1}],
                token_item_index=0,
                response_id="chatcmpl-1",
                finish_reason="tool_calls",
                weight_version="step-7",
                sampling={"temperature": 0.7, "stop": ["\n\n"], "seed": None},
                log_probs_mode="raw_logprobs",
                upstream="http://10.0.0.5:8000",
                headers={"x-agent": ["a", "\u0000\U0001f642"]},
                score=1e-300,
            ),
            make_entry("long", list(range(50_000)), routed_experts=[[[1, 2], [3, 4]]]),
        ]
        for entry in entries:
            await store.sink.put(entry)
        snapshot = await store.source.freeze(ROLLOUT)
        assert [entry.model_call_id for entry in snapshot.entries] == [entry.model_call_id for entry in entries]
        for stored, put in zip(snapshot.entries, entries, strict=True):
            assert_same_entry(stored, put)
        assert not snapshot.incomplete

    @scenario
    async def test_prompts_that_extend_earlier_calls_come_back_whole(self, store: OpenedStore) -> None:
        entries, prompt = [], [1, 2, 3]
        for turn in range(6):
            entries.append(make_entry(f"call-{turn}", prompt))
            # Turns 2 and 3 read the same history, as a retry does; turn 5 begins anew.
            prompt = [9] if turn == 4 else prompt if turn == 2 else [*prompt, 4, 5, 6, 100 + turn]
        for entry in reversed(entries):
            await store.sink.put(entry)
        snapshot = await store.source.freeze(ROLLOUT)
        for stored, put in zip(snapshot.entries, reversed(entries), strict=True):
            assert_same_entry(stored, put)

    @scenario
    async def test_every_entry_acknowledged_before_a_freeze_is_in_it(
        self, first: OpenedStore, second: OpenedStore
    ) -> None:
        puts = [(first, second)[number % 2].sink.put(make_entry(f"call-{number}", [number])) for number in range(64)]
        await asyncio.gather(*puts)
        snapshot = await first.source.freeze(ROLLOUT)
        assert {entry.model_call_id for entry in snapshot.entries} == {f"call-{number}" for number in range(64)}

    @scenario
    async def test_an_acknowledged_entry_is_visible_to_others_at_once(
        self, first: OpenedStore, second: OpenedStore
    ) -> None:
        for number in range(10):
            await first.sink.put(make_entry("call", rollout_id=f"rollout-{number}"))
            assert len((await second.source.freeze(f"rollout-{number}")).entries) == 1

    def test_what_was_acknowledged_outlives_a_close(self, tmp_path: Path) -> None:
        async def leave() -> None:
            async with self.open_store(tmp_path) as (sink, source):
                await sink.put(make_entry("call"))
                await sink.mark_incomplete("marked", "", reasons.NO_TOKEN_IDS)
                await sink.close()
                await sink.close()
                await source.close()

        async def come_back() -> None:
            async with self.open_store(tmp_path) as (_, source):
                assert [entry.model_call_id for entry in (await source.freeze(ROLLOUT)).entries] == ["call"]
                assert (await source.freeze("marked")).incomplete

        asyncio.run(leave())
        asyncio.run(come_back())

    @scenario
    async def test_putting_the_same_entry_again_changes_nothing(self, first: OpenedStore, second: OpenedStore) -> None:
        await asyncio.gather(*(store.sink.put(make_entry("call")) for store in (first, second, first, second)))
        snapshot = await first.source.freeze(ROLLOUT)
        assert len(snapshot.entries) == 1
        await second.sink.put(make_entry("call"))
        assert await first.source.freeze(ROLLOUT) == snapshot
        assert not snapshot.incomplete
        assert await second.drop(snapshot)

    @pytest.mark.parametrize(
        "change",
        [
            {"generation_token_ids": [4, 5, 7]},
            {"generation_log_probs": [-0.25, -1.5, -0.0078126]},
            {"prompt_token_ids": [1, 2, 3, 3]},
            {"output_items": [{"type": "message"}]},
            {"created_at": 1700000000.25},
            {"extra": 1},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_another_payload_under_a_known_call_id_is_refused(self, tmp_path: Path, change: dict[str, Any]) -> None:
        async def conflict(_: Contract, first: OpenedStore, second: OpenedStore) -> None:
            await first.sink.put(make_entry("call"))
            with pytest.raises(ConflictingEntryError, match="reused with a different payload") as caught:
                await second.sink.put(make_entry("call", **change))
            assert isinstance(caught.value, ValueError)
            snapshot = await first.source.freeze(ROLLOUT)
            assert snapshot.incomplete
            (kept,) = snapshot.entries
            assert_same_entry(kept, make_entry("call"))

        scenario(conflict)(self, tmp_path)

    @scenario
    async def test_a_conflict_after_a_freeze_makes_the_snapshot_stale(self, store: OpenedStore) -> None:
        await store.sink.put(make_entry("call"))
        snapshot = await store.source.freeze(ROLLOUT)
        with pytest.raises(ConflictingEntryError):
            await store.sink.put(make_entry("call", model="other"))
        assert not await store.drop(snapshot)
        assert (await store.source.freeze(ROLLOUT)).incomplete

    @scenario
    async def test_of_two_payloads_at_once_one_is_kept(self, first: OpenedStore, second: OpenedStore) -> None:
        entries = [make_entry("call", model="one"), make_entry("call", model="two")]
        results = await asyncio.gather(first.sink.put(entries[0]), second.sink.put(entries[1]), return_exceptions=True)
        assert sorted(type(result).__name__ for result in results) == ["ConflictingEntryError", "NoneType"]
        snapshot = await first.source.freeze(ROLLOUT)
        assert snapshot.incomplete
        (kept,) = snapshot.entries
        assert_same_entry(kept, entries[results.index(None)])
