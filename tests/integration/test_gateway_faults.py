"""What goes wrong between a harness and an engine: the client sees the engine's answer, the store the truth."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from support.made_up import BODY, CHAT, FIRST, STREAM, answering, chat, delta, events, streaming, usage
from support.replay import Gateway, Recording, running_gateway, until
from token_id_capture.store import TokenCaptureStore
from token_id_capture.store.write.writer import Writer


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path) as running:
        yield running


async def masked(gateway: Gateway, rollout: str = "r1") -> bool:
    return (await gateway.store.freeze(rollout)).incomplete


async def test_a_gap_in_streamed_ids_is_a_count_mismatch_and_the_client_sees_every_event(gateway: Gateway) -> None:
    sent = events(FIRST, delta([10, 11]), delta([12, 13, 14], "tool_calls"), usage(12))
    gateway.engine.handler = streaming(*sent)
    response = await gateway.post(
        CHAT, {**STREAM, "logprobs": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    )
    assert response.body == b"".join(sent)
    assert response.whole
    assert await gateway.flags() == [("token_count_mismatch", "5 token ids, 5 log probabilities, 12 completion tokens")]
    assert await gateway.store.read_entries("r1") == ()
    assert await masked(gateway)


@pytest.mark.parametrize(
    ("response", "reason", "detail"),
    [
        (chat([5, 6], None), "no_token_ids", "choice 0 has no log probabilities"),
        (chat(None, [-0.1], 1), "no_token_ids", "choice 0 has no token ids"),
        ({**chat([5], [-0.1]), "prompt_token_ids": None}, "no_token_ids", "choice 0 has no prompt token ids"),
        ({**chat([5], [-0.1]), "choices": []}, "no_token_ids", "the response has no choices"),
        (chat([5, 6], [-0.1]), "token_count_mismatch", "2 token ids, 1 log probabilities, 2 completion tokens"),
        (chat([5], [-0.1], 2), "token_count_mismatch", "1 token ids, 1 log probabilities, 2 completion tokens"),
        (
            {**chat([5], [-0.1]), "usage": None},
            "token_count_mismatch",
            "1 token ids, 1 log probabilities, no count of completion tokens",
        ),
        (
            {**chat([5], [-0.1]), "usage": {"completion_tokens": 1, "prompt_tokens": 50}},
            "token_count_mismatch",
            "3 prompt token ids, 50 prompt tokens",
        ),
        (
            {**chat([5], [-0.1]), "prompt_token_ids": [1, True]},
            "invalid_tokens",
            "choice 0: a boolean among the prompt token ids",
        ),
        (
            {**chat([5], [-0.1], prompt_token_ids=[1, 2]), "prompt_token_ids": [1, 2, 3]},
            "invalid_tokens",
            "choice 0: the response names two different prompts",
        ),
        (chat([5, 6], [-0.1, 5.0]), "invalid_tokens", "log probability 1 is 5.0, above 0"),
        (chat([5], [-0.1], finish_reason=None), "lost_stream", "choice 0 has no finish reason"),
        (chat([5, 6], [-0.1, -9999.0]), "log_prob_placeholder", "log probability 1 is -9999.0"),
        (
            chat([5, 6], [-0.1, None]),
            "invalid_tokens",
            "choice 0: log probabilities must be numbers (must be real number, not NoneType)",
        ),
        (
            chat([5, -6], [-0.1, -0.2]),
            "invalid_tokens",
            "choice 0: token ids must be integers from 0 to 4294967295 (can't convert negative value to unsigned int)",
        ),
        (
            chat(
                [10, 11, 12],
                None,
                logprobs={"content": [{"token": f"token_id:{n}", "logprob": -0.1} for n in (11, 12, 13)]},
            ),
            "invalid_tokens",
            "choice 0: token id 0 is 10, but its log probability is for 11",
        ),
    ],
)
async def test_tokens_that_are_missing_unequal_or_wrong_are_never_stored(
    gateway: Gateway, response: dict[str, Any], reason: str, detail: str
) -> None:
    gateway.engine.handler = answering(response)
    seen = await gateway.post(CHAT, {**BODY, "logprobs": True, "return_token_ids": True})
    assert (seen.status, seen.json()) == (200, response)
    assert await gateway.flags() == [(reason, detail)]
    assert await gateway.store.read_entries("r1") == ()
    assert await masked(gateway)


async def test_ids_that_only_the_token_texts_spell_are_taken(gateway: Gateway) -> None:
    spelled = {"content": [{"token": f"token_id:{n}", "logprob": -0.1} for n in (11, 12)]}
    gateway.engine.handler = answering(chat(None, None, 2, logprobs=spelled))
    await gateway.post(CHAT, BODY)
    assert (await gateway.entry()).generation_token_ids == [11, 12]


@pytest.mark.parametrize("response", [chat([], []), chat([], None), chat(None, None, 0)])
async def test_an_empty_generation_is_a_call_without_tokens(gateway: Gateway, response: dict[str, Any]) -> None:
    gateway.engine.handler = answering(response)
    await gateway.post(CHAT, BODY)
    entry = await gateway.entry()
    assert (len(entry.prompt_token_ids), len(entry.generation_token_ids)) == (3, 0)
    assert not await masked(gateway)


async def test_an_empty_generation_of_a_stream_is_one_too(gateway: Gateway) -> None:
    end = {"index": 0, "delta": {}, "finish_reason": "stop"}
    gateway.engine.handler = streaming(*events({"choices": [end], "prompt_token_ids": [1, 2, 3]}, usage(0)))
    await gateway.post(CHAT, STREAM)
    assert len((await gateway.entry()).generation_token_ids) == 0


@pytest.mark.parametrize(
    "name",
    [
        "18-error-too-long",
        "18b-error-too-long-stream",
        "18c-error-max-tokens-0",
        "18d-error-unknown-model",
        "18i-error-no-messages",
    ],
)
async def test_a_call_that_the_engine_refuses_is_no_hole(gateway: Gateway, name: str) -> None:
    recording = Recording.named(name)
    body = orjson.loads(recording.sent)
    for added, value in recording.added.items():
        body.setdefault(added, value)

    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=recording.payload, status=recording.status, content_type="application/json")

    gateway.engine.handler = handler
    response = await gateway.post(CHAT, body)
    assert (response.status, response.body) == (recording.status, recording.payload)
    details = await gateway.store.describe_rollout("r1")
    (intent,) = details.intents
    assert intent.outcome == "refused"
    assert intent.detail.startswith(f"HTTP {recording.status}: ")
    assert details.flags == ()
    assert not await masked(gateway)


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_next_call_of_a_closed_rollout_is_not_dispatched(gateway: Gateway, streamed: bool) -> None:
    await gateway.replay("01-chat")
    snapshot = await gateway.store.freeze("r1")
    response = await gateway.post(CHAT, STREAM if streamed else BODY)
    assert response.status == 410
    assert "already frozen" in response.json()["error"]["message"]
    assert len(gateway.engine.received) == 1
    assert await gateway.store.drop("r1", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    assert (await gateway.post(CHAT, BODY)).status == 410


async def test_a_call_that_ends_after_the_freeze_is_late_and_leaves_the_snapshot_alone(gateway: Gateway) -> None:
    go_on = asyncio.Event()
    gateway.engine.handler = answering(chat([5], [-0.1]), after=go_on)
    call = asyncio.create_task(gateway.post(CHAT, BODY))

    async def dispatched() -> bool:
        return bool(gateway.engine.received)

    await until(dispatched)
    snapshot = await gateway.store.freeze("r1")
    go_on.set()
    assert (await call).status == 200
    details = await gateway.store.describe_rollout("r1")
    assert len(details.late_writes) == 1
    assert details.flags == ()
    again = await gateway.store.freeze("r1")
    assert (again.version, again.entries) == (snapshot.version, ())


async def test_ids_in_the_message_itself_are_captured_and_cut_from_the_response(gateway: Gateway) -> None:
    arrays = {"prompt_token_ids": [1, 2], "generation_token_ids": [3, 4], "generation_log_probs": [-0.1, -0.2]}
    message = {"role": "assistant", "content": "hi", **arrays}
    plain = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]}
    response = {"choices": [{**plain["choices"][0], "message": message}], "usage": {"completion_tokens": 2}}
    gateway.engine.handler = answering(response)
    seen = await gateway.post(CHAT, BODY)
    assert seen.json() == {**plain, "usage": {"completion_tokens": 2}}
    entry = await gateway.entry()
    assert (entry.prompt_token_ids, entry.generation_token_ids) == ([1, 2], [3, 4])
    assert entry.output_items == [{"type": "message", "role": "assistant", "content": "hi"}]


async def test_an_engine_chosen_by_name_is_sent_only_its_own_fields(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, engine="message") as gateway:
        gateway.engine.handler = answering(chat([5], [-0.1]))
        await gateway.post(CHAT, BODY)
        assert gateway.engine.received[-1].json() == BODY
        assert [reason for reason, _ in await gateway.flags()] == ["no_token_ids"]


async def test_a_call_that_could_not_be_stored_is_refused_before_the_engine_is_asked(tmp_path: Path) -> None:
    store = TokenCaptureStore(tmp_path, free_space_floor=2**62)
    async with running_gateway(tmp_path, store=store) as gateway:
        gateway.engine.handler = answering(chat([5, 6], [-0.1, -0.2]))
        assert (await gateway.post(CHAT, BODY)).status == 503
        assert gateway.engine.received == []
        assert await gateway.store.list_rollouts() == []


async def test_a_disk_that_fills_up_costs_no_model_call_and_masks_the_rollout_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_gateway(tmp_path) as gateway:
        answer = answering(chat([5, 6], [-0.1, -0.2]))

        async def fill_up(request: Any) -> Any:
            monkeypatch.setattr(Writer, "_shortage", lambda writer, now: "the disk is full")
            return await answer(request)

        gateway.engine.handler = fill_up
        assert (await gateway.post(CHAT, BODY)).status == 200
        [(reason, detail)] = await gateway.flags()
        assert reason == "store_failed"
        assert "StorageFullError" in detail
        assert await gateway.store.read_entries("r1") == ()
        assert await masked(gateway)
    monkeypatch.undo()
    async with running_gateway(tmp_path) as gateway:
        gateway.engine.handler = answering(chat([5, 6], [-0.1, -0.2]))
        assert (await gateway.post(CHAT, BODY, rollout="r2")).status == 200
        assert not await masked(gateway, "r2")
