"""The sink side: whatever goes wrong marks the rollout, nothing of it reaches the model call."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from support.memory_sink import MemorySink, PlainSink
from token_id_capture.capture.recorder import CallRecorder
from token_id_capture.errors import (
    ConflictingEntryError,
    RolloutFrozenError,
    RolloutRetiredError,
    StorageFullError,
)
from token_id_capture.records import TokenEntry
from token_id_capture.sink import (
    CaptureContext,
    capture_tokens,
    commit_choices,
    commit_entry,
    current_capture_context,
    refuse_current_call,
    register_call_intent,
    reset_token_sink,
    set_token_sink,
)


@contextmanager
def serving(sink: PlainSink | None, model: str = "") -> Iterator[CaptureContext]:
    context = CaptureContext("r1", "c1", sink, model)
    token = set_token_sink(context)
    try:
        yield context
    finally:
        reset_token_sink(token)


def chat(**message: Any) -> dict[str, Any]:
    arrays = {"prompt_token_ids": [1, 2], "generation_token_ids": [3, 4], "generation_log_probs": [-0.1, -0.2]}
    carrier = {"role": "assistant", "content": "hi", **arrays, **message}
    return {"id": "chat-1", "model": "tiny", "choices": [{"message": carrier, "finish_reason": "stop"}]}


def entry(model_call_id: str = "c1", rollout_id: str = "r1", **fields: Any) -> TokenEntry:
    known = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.5], **fields}
    return TokenEntry(rollout_id=rollout_id, model_call_id=model_call_id, **known)


async def test_outside_a_captured_request_everything_is_a_no_op() -> None:
    assert current_capture_context() is None
    await register_call_intent()
    await capture_tokens(chat())
    await commit_entry(entry())
    await refuse_current_call("")


async def test_a_context_without_a_sink_captures_and_marks_nothing() -> None:
    with serving(None) as context:
        await register_call_intent()
        await capture_tokens({"choices": []})
        await commit_entry(entry("other"))
        assert not context.committed


async def test_a_call_is_announced_recorded_and_then_committed() -> None:
    sink = MemorySink()
    with serving(sink) as context:
        await register_call_intent()
        assert sink.open == [("r1", "c1")]
        await capture_tokens(chat())
    assert sink.calls == ["begin_call", "put"]
    assert context.committed
    (stored,) = sink.entries
    assert (stored.rollout_id, stored.model_call_id, stored.model) == ("r1", "c1", "tiny")
    assert stored.prompt_token_ids == [1, 2]
    assert stored.generation_token_ids == [3, 4]
    assert stored.generation_log_probs == [-0.1, -0.2]
    assert (stored.response_id, stored.finish_reason) == ("chat-1", "stop")
    assert stored.output_items == [{"type": "message", "role": "assistant", "content": "hi"}]
    assert stored.token_item_index == 0
    assert stored.created_at > 0


async def test_a_sink_that_only_begins_calls_is_told_of_each_and_of_no_refusal() -> None:
    class OnlyBegins(PlainSink):
        async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
            self._enter("begin_call")

    sink = OnlyBegins()
    with serving(sink) as context:
        await register_call_intent()
        await CallRecorder(context).refuse("HTTP 400")
    assert sink.calls == ["begin_call"]


async def test_a_responses_response_is_recorded_from_its_output_items() -> None:
    sink = MemorySink()
    arrays = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.5]}
    call = {"type": "function_call", "name": "f", "arguments": '{ "a":1.0}', **arrays}
    with serving(sink, model="asked-for"):
        await capture_tokens({"id": "resp-1", "output": [{"type": "reasoning", "summary": []}, call]})
    (stored,) = sink.entries
    assert stored.model == "asked-for"
    assert stored.token_item_index == 1
    assert stored.output_items[1] == {"type": "function_call", "name": "f", "arguments": '{ "a":1.0}'}


async def test_an_intent_that_cannot_be_registered_fails_the_call() -> None:
    with serving(MemorySink(begin_call=StorageFullError("no room"))), pytest.raises(StorageFullError, match="no room"):
        await register_call_intent()


async def test_a_sink_without_intents_is_used_without_them() -> None:
    sink = PlainSink()
    with serving(sink):
        await register_call_intent()
        await refuse_current_call("HTTP 400")
        await capture_tokens(chat())
    assert sink.calls == ["put"]


@pytest.mark.parametrize(
    ("response", "mark"),
    [
        ({"choices": []}, "no_token_ids: no item of the response carries token arrays"),
        (
            chat(prompt_token_ids=None),
            "invalid_tokens: the response item that carries token arrays lacks prompt_token_ids",
        ),
        (
            chat(generation_log_probs=[-0.1]),
            "invalid_tokens: Value error, generation_token_ids and generation_log_probs must have the same length, "
            "not 2 and 1",
        ),
        (
            chat(generation_token_ids=[3, -4]),
            "invalid_tokens: generation_token_ids: token ids must be integers from 0 to 4294967295 "
            "(can't convert negative value to unsigned int)",
        ),
        (chat(generation_log_probs=[-0.1, -9999.0]), "log_prob_placeholder: log probability 1 is -9999.0"),
    ],
)
async def test_a_response_that_cannot_be_captured_marks_the_rollout_with_the_reason(
    response: dict[str, Any], mark: str
) -> None:
    sink = MemorySink()
    with serving(sink) as context:
        await register_call_intent()
        await capture_tokens(response)
    assert sink.marks == [("r1", "c1", mark)]
    assert sink.entries == []
    assert sink.open == [("r1", "c1")]
    assert not context.committed


async def test_an_unexpected_error_marks_the_rollout_and_spares_the_call() -> None:
    sink = MemorySink()
    with serving(sink):
        await capture_tokens(None)  # type: ignore[arg-type]
    assert [reason.partition(":")[0] for *_, reason in sink.marks] == ["capture_failed"]


async def test_a_failed_write_marks_the_rollout_and_spares_the_call() -> None:
    sink = MemorySink(put=StorageFullError("no room"))
    with serving(sink) as context:
        await register_call_intent()
        await capture_tokens(chat())
    assert sink.marks == [("r1", "c1", "store_failed: StorageFullError: no room")]
    assert sink.open == [("r1", "c1")]
    assert not context.committed


async def test_if_even_the_mark_fails_the_intent_stays_open() -> None:
    sink = MemorySink(put=StorageFullError("no room"), mark_incomplete=StorageFullError("no room"))
    with serving(sink):
        await register_call_intent()
        await capture_tokens(chat())
    assert sink.open == [("r1", "c1")]


@pytest.mark.parametrize("late", [RolloutFrozenError("r1", "c1"), RolloutRetiredError("r1", "put of call c1")])
async def test_a_late_write_is_not_marked_for_that_would_stale_the_snapshot(late: Exception) -> None:
    sink = MemorySink(put=late)
    with serving(sink):
        await capture_tokens(chat())
    assert sink.marks == []


async def test_a_conflict_is_not_marked_again_for_the_sink_has_flagged_it() -> None:
    sink = MemorySink(put=ConflictingEntryError("r1", "c1"))
    with serving(sink) as context:
        await capture_tokens(chat())
    assert (sink.marks, context.committed) == ([], False)


async def test_a_call_that_the_engine_side_committed_is_not_captured_twice() -> None:
    sink = MemorySink()
    with serving(sink):
        await commit_entry(entry())
        await capture_tokens(chat())
    assert [stored.generation_token_ids.tolist() for stored in sink.entries] == [[2]]


@pytest.mark.parametrize("foreign", [entry("c2"), entry(rollout_id="r2")])
async def test_an_entry_of_another_call_is_not_written_and_marks_the_rollout(foreign: TokenEntry) -> None:
    sink = MemorySink()
    with serving(sink):
        await commit_entry(foreign)
    assert sink.entries == []
    named = f"the entry names call {foreign.model_call_id!r} of rollout {foreign.rollout_id!r}"
    assert sink.marks == [("r1", "c1", f"id_mismatch: {named}")]


async def test_the_choice_that_ends_the_intent_is_written_last() -> None:
    sink = MemorySink()
    with serving(sink):
        await register_call_intent()
        await commit_choices([entry("c1"), entry("c1.1"), entry("c1.2")])
    assert [stored.model_call_id for stored in sink.entries] == ["c1.1", "c1.2", "c1"]


async def test_a_placeholder_in_one_choice_keeps_all_of_them_out() -> None:
    sink = MemorySink()
    with serving(sink):
        await commit_choices([entry("c1"), entry("c1.1", generation_log_probs=[-10000.5])])
    assert sink.entries == []
    assert sink.marks == [("r1", "c1", "log_prob_placeholder: log probability 0 is -10000.5")]


async def test_a_cancelled_write_leaves_the_intent_open() -> None:
    class Slow(MemorySink):
        async def put(self, entry: TokenEntry) -> None:
            await asyncio.Event().wait()

    sink = Slow()
    with serving(sink):
        await register_call_intent()
        task = asyncio.create_task(capture_tokens(chat()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (sink.open, sink.marks) == ([("r1", "c1")], [])


async def test_contexts_of_concurrent_requests_do_not_meet() -> None:
    async def serve(call: str) -> str:
        token = set_token_sink(CaptureContext("r1", call, None))
        await asyncio.sleep(0)
        context = current_capture_context()
        reset_token_sink(token)
        assert context is not None
        return context.model_call_id

    calls = [f"c{number}" for number in range(20)]
    assert await asyncio.gather(*map(serve, calls)) == calls
    assert current_capture_context() is None
