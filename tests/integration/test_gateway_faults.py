"""What goes wrong between a harness and an engine: the client sees the engine's answer, the store the truth."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from made_up import BODY, CHAT, FIRST, STREAM, answering, chat, delta, events, streaming, usage
from replay import Gateway, Recording, gateway, until

from token_id_capture.store import TokenCaptureStore


@pytest.fixture
async def gate(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with gateway(tmp_path) as running:
        yield running


async def masked(gate: Gateway, rollout: str = "r1") -> bool:
    return (await gate.store.freeze(rollout)).incomplete


async def test_a_gap_in_streamed_ids_is_a_count_mismatch_and_the_client_sees_every_event(gate: Gateway) -> None:
    sent = events(FIRST, delta([10, 11]), delta([12, 13, 14], "tool_calls"), usage(12))
    gate.engine.handler = streaming(*sent)
    reply = await gate.post(
        CHAT, {**STREAM, "logprobs": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    )
    assert reply.body == b"".join(sent)
    assert reply.whole
    assert await gate.flags() == [("token_count_mismatch", "5 token ids, 5 log probabilities, 12 completion tokens")]
    assert await gate.store.read_entries("r1") == ()
    assert await masked(gate)


@pytest.mark.parametrize(
    ("reply", "reason", "detail"),
    [
        (chat([5, 6], None), "no_token_ids", "choice 0 has no log probabilities"),
        (chat(None, [-0.1], 1), "no_token_ids", "choice 0 has no token ids"),
        ({**chat([5], [-0.1]), "prompt_token_ids": None}, "no_token_ids", "choice 0 has no prompt token ids"),
        ({**chat([5], [-0.1]), "choices": []}, "no_token_ids", "the reply has no choices"),
        (chat([5, 6], [-0.1]), "token_count_mismatch", "2 token ids, 1 log probabilities, 2 completion tokens"),
        (chat([5], [-0.1], 2), "token_count_mismatch", "1 token ids, 1 log probabilities, 2 completion tokens"),
        (
            {**chat([5], [-0.1]), "usage": None},
            "token_count_mismatch",
            "1 token ids, 1 log probabilities, no count of completion tokens",
        ),
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
    gate: Gateway, reply: dict[str, Any], reason: str, detail: str
) -> None:
    gate.engine.handler = answering(reply)
    seen = await gate.post(CHAT, {**BODY, "logprobs": True, "return_token_ids": True})
    assert (seen.status, seen.json()) == (200, reply)
    assert await gate.flags() == [(reason, detail)]
    assert await gate.store.read_entries("r1") == ()
    assert await masked(gate)


async def test_ids_that_only_the_token_texts_spell_are_taken(gate: Gateway) -> None:
    spelled = {"content": [{"token": f"token_id:{n}", "logprob": -0.1} for n in (11, 12)]}
    gate.engine.handler = answering(chat(None, None, 2, logprobs=spelled))
    await gate.post(CHAT, BODY)
    assert (await gate.entry()).generation_token_ids == [11, 12]


@pytest.mark.parametrize("reply", [chat([], []), chat([], None), chat(None, None, 0)])
async def test_an_empty_generation_is_a_call_without_tokens(gate: Gateway, reply: dict[str, Any]) -> None:
    gate.engine.handler = answering(reply)
    await gate.post(CHAT, BODY)
    entry = await gate.entry()
    assert (len(entry.prompt_token_ids), len(entry.generation_token_ids)) == (3, 0)
    assert not await masked(gate)


async def test_an_empty_generation_of_a_stream_is_one_too(gate: Gateway) -> None:
    end = {"index": 0, "delta": {}, "finish_reason": "stop"}
    gate.engine.handler = streaming(*events({"choices": [end], "prompt_token_ids": [1, 2, 3]}, usage(0)))
    await gate.post(CHAT, STREAM)
    assert len((await gate.entry()).generation_token_ids) == 0


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
async def test_a_call_that_the_engine_refuses_is_no_hole(gate: Gateway, name: str) -> None:
    recording = Recording.named(name)
    body = orjson.loads(recording.sent)
    for added, value in recording.added.items():
        body.setdefault(added, value)

    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=recording.payload, status=recording.status, content_type="application/json")

    gate.engine.handler = handler
    reply = await gate.post(CHAT, body)
    assert (reply.status, reply.body) == (recording.status, recording.payload)
    details = await gate.store.describe_rollout("r1")
    (intent,) = details.intents
    assert intent.outcome == "refused"
    assert intent.detail.startswith(f"HTTP {recording.status}: ")
    assert details.flags == ()
    assert not await masked(gate)


async def test_a_malformed_body_is_the_engines_to_answer_and_leaves_nothing_behind(gate: Gateway) -> None:
    recording = Recording.named("18e-error-malformed-json")
    reply = await gate.replay(recording.name, recording.sent)
    assert (reply.status, reply.body) == (400, recording.payload)
    assert gate.engine.received[-1].body == recording.sent
    assert await gate.store.list_rollouts() == []


@pytest.mark.parametrize("body", [b"[1]", b'"text"', b"{", b"\xff\xfe", b""])
async def test_a_body_that_no_parser_reads_but_the_engine_answers_is_marked(gate: Gateway, body: bytes) -> None:
    gate.engine.handler = answering(chat([5], [-0.1]))
    assert (await gate.post(CHAT, body)).status == 200
    assert await gate.flags() == [("uncaptured_endpoint", "a body that is no JSON object")]


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"messages":[],"temperature":NaN}',
        '{"messages":[{"role":"user","content":"é"}]}'.encode("utf-16"),
        b"\xef\xbb\xbf" + b'{"messages":[]}',
    ],
)
async def test_bodies_that_only_python_reads_are_captured_too(gate: Gateway, body: bytes) -> None:
    import json

    gate.engine.handler = answering(chat([5], [-0.1]))
    assert (await gate.post(CHAT, body)).status == 200
    sent = json.loads(gate.engine.received[-1].body)
    assert sent["return_token_ids"] is True
    assert repr(sent["messages"]) == repr(json.loads(body)["messages"])
    assert len((await gate.entry()).generation_token_ids) == 1


@pytest.mark.parametrize("status", [500, 503])
async def test_an_engine_error_leaves_the_intent_open_and_the_reason_in_one_select(gate: Gateway, status: int) -> None:
    gate.engine.handler = answering({"error": {"message": "CUDA error", "type": "server_error"}}, status)
    reply = await gate.post(CHAT, BODY)
    assert (reply.status, reply.json()["error"]["message"]) == (status, "CUDA error")
    assert await gate.flags() == [("unknown_outcome", f"HTTP {status}: CUDA error")]
    assert await gate.intents() == [None]
    assert await masked(gate)


async def test_an_engine_that_is_not_there_is_a_502_and_no_hole(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with gateway(tmp_path, upstream=f"http://127.0.0.1:{port}") as gate:
        for path in (CHAT, "/v1/responses"):
            reply = await gate.post(path, BODY)
            assert reply.status == 502
            assert f"127.0.0.1:{port}" in reply.json()["error"]["message"]
        assert await gate.intents() == ["refused", "refused"]
        assert not await masked(gate)
        assert (await gate.request("GET", gate.base() + "/v1/models")).status == 502


async def test_an_engine_that_says_nothing_is_a_504_and_the_outcome_unknown(tmp_path: Path) -> None:
    async with gateway(tmp_path, read_timeout=0.2) as gate:
        released = asyncio.Event()

        async def handler(request: web.Request) -> web.Response:
            await released.wait()
            return web.Response()

        gate.engine.handler = handler
        reply = await gate.post(CHAT, BODY)
        released.set()
        assert reply.status == 504
        ((reason, detail),) = await gate.flags()
        assert reason == "unknown_outcome"
        assert detail.endswith("sent nothing for 0.2 s")
        assert await gate.intents() == [None]


async def test_an_engine_that_hangs_up_before_it_answers_is_a_502_and_the_outcome_unknown(gate: Gateway) -> None:
    gate.engine.handler = hanging_up()
    reply = await gate.post(CHAT, BODY)
    assert reply.status == 502
    ((reason, _),) = await gate.flags()
    assert reason == "unknown_outcome"
    assert await masked(gate)


def hanging_up(*chunks: bytes) -> Any:
    """A handler that streams these chunks and then breaks the connection."""

    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        if chunks:
            await response.prepare(request)
            for chunk in chunks:
                await response.write(chunk)
        request.transport.close()
        return response

    return handler


async def test_a_reply_that_breaks_off_is_unknown(gate: Gateway) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        response = web.StreamResponse(headers={"content-type": "application/json", "content-length": "1000"})
        await response.prepare(request)
        await response.write(b'{"id":')
        request.transport.close()
        return response

    gate.engine.handler = handler
    assert (await gate.post(CHAT, BODY)).status == 502
    assert [reason for reason, _ in await gate.flags()] == ["unknown_outcome"]


async def test_a_stream_that_breaks_off_is_lost_and_the_clients_breaks_too(gate: Gateway) -> None:
    sent = events(FIRST, delta([10]), done=False)
    gate.engine.handler = hanging_up(*sent)
    reply = await gate.post(CHAT, {**STREAM, "logprobs": True, "return_token_ids": True})
    assert (reply.status, reply.body, reply.whole) == (200, b"".join(sent), False)
    assert [reason for reason, _ in await gate.flags()] == ["lost_stream"]
    assert await gate.intents() == [None]
    assert await gate.store.read_entries("r1") == ()


@pytest.mark.parametrize(
    ("chunks", "detail"),
    [
        (
            events(FIRST, delta([10]), done=False),
            "neither [DONE] nor the token count came; choice 0 has no finish reason",
        ),
        (events(FIRST, delta([10], "stop"), done=False), "neither [DONE] nor the token count came"),
        (events(FIRST, delta([10]), usage(1)), "the stream ended early; choice 0 has no finish reason"),
        (
            [*events(FIRST, delta([10]), done=False), b"data: {"],
            "neither [DONE] nor the token count came; choice 0 has no finish reason",
        ),
    ],
)
async def test_a_stream_that_ends_early_is_lost_however_clean_its_end(
    gate: Gateway, chunks: list[bytes], detail: str
) -> None:
    gate.engine.handler = streaming(*chunks)
    asked = {"logprobs": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    reply = await gate.post(CHAT, {**STREAM, **asked})
    assert reply.body == b"".join(chunks)
    # Where the engine said [DONE] the client's reply ends; else it breaks, and must not look whole.
    assert reply.whole == chunks[-1].startswith(b"data: [DONE]")
    assert await gate.flags() == [("lost_stream", detail)]
    assert await masked(gate)


async def test_a_stream_without_its_last_line_is_whole_if_all_that_counts_was_there(gate: Gateway) -> None:
    gate.engine.handler = streaming(*events(FIRST, delta([10], "stop"), usage(1), done=False))
    assert (await gate.post(CHAT, STREAM)).whole
    assert (await gate.entry()).generation_token_ids == [10]
    assert not await masked(gate)


async def test_an_error_inside_a_stream_is_passed_on_and_the_outcome_unknown(gate: Gateway) -> None:
    sent = events(FIRST, delta([10]), {"error": {"message": "engine died", "code": 500}})
    gate.engine.handler = streaming(*sent)
    reply = await gate.post(CHAT, {**STREAM, "logprobs": True, "return_token_ids": True})
    assert (reply.body, reply.whole) == (b"".join(sent), True)
    assert await gate.flags() == [("unknown_outcome", "engine died")]
    assert await masked(gate)


async def test_a_reply_that_is_no_json_is_passed_on_and_marked(gate: Gateway) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=b"<html>", content_type="text/html")

    gate.engine.handler = handler
    reply = await gate.post(CHAT, BODY)
    assert (reply.status, reply.body) == (200, b"<html>")
    assert [reason for reason, _ in await gate.flags()] == ["invalid_tokens"]


async def test_events_that_are_no_json_are_passed_on_and_marked(gate: Gateway) -> None:
    sent = [b"data: nonsense\n\n", *events(FIRST, delta([10], "stop"), usage(1))]
    gate.engine.handler = streaming(*sent)
    asked = {"logprobs": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    assert (await gate.post(CHAT, {**STREAM, **asked})).body == b"".join(sent)
    assert [reason for reason, _ in await gate.flags()] == ["invalid_tokens"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_next_call_of_a_closed_rollout_is_not_dispatched(gate: Gateway, streamed: bool) -> None:
    await gate.replay("01-chat")
    snapshot = await gate.store.freeze("r1")
    reply = await gate.post(CHAT, STREAM if streamed else BODY)
    assert reply.status == 410
    assert "already frozen" in reply.json()["error"]["message"]
    assert len(gate.engine.received) == 1
    assert await gate.store.drop("r1", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    assert (await gate.post(CHAT, BODY)).status == 410


async def test_a_call_that_ends_after_the_freeze_is_late_and_leaves_the_snapshot_alone(gate: Gateway) -> None:
    go_on = asyncio.Event()
    gate.engine.handler = answering(chat([5], [-0.1]), after=go_on)
    call = asyncio.create_task(gate.post(CHAT, BODY))

    async def dispatched() -> bool:
        return bool(gate.engine.received)

    await until(dispatched)
    snapshot = await gate.store.freeze("r1")
    go_on.set()
    assert (await call).status == 200
    details = await gate.store.describe_rollout("r1")
    assert len(details.late_writes) == 1
    assert details.flags == ()
    again = await gate.store.freeze("r1")
    assert (again.version, again.entries) == (snapshot.version, ())


async def test_ids_in_the_message_itself_are_captured_and_cut_from_the_reply(gate: Gateway) -> None:
    arrays = {"prompt_token_ids": [1, 2], "generation_token_ids": [3, 4], "generation_log_probs": [-0.1, -0.2]}
    message = {"role": "assistant", "content": "hi", **arrays}
    plain = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]}
    reply = {"choices": [{**plain["choices"][0], "message": message}], "usage": {"completion_tokens": 2}}
    gate.engine.handler = answering(reply)
    seen = await gate.post(CHAT, BODY)
    assert seen.json() == {**plain, "usage": {"completion_tokens": 2}}
    entry = await gate.entry()
    assert (entry.prompt_token_ids, entry.generation_token_ids) == ([1, 2], [3, 4])
    assert entry.output_items == [{"type": "message", "role": "assistant", "content": "hi"}]


async def test_an_engine_chosen_by_name_is_sent_only_its_own_fields(tmp_path: Path) -> None:
    async with gateway(tmp_path, engine="message") as gate:
        gate.engine.handler = answering(chat([5], [-0.1]))
        await gate.post(CHAT, BODY)
        assert gate.engine.received[-1].json() == BODY
        assert [reason for reason, _ in await gate.flags()] == ["no_token_ids"]


async def test_a_full_disk_costs_no_model_call_and_masks_the_rollout_until_there_is_room(tmp_path: Path) -> None:
    store = TokenCaptureStore(tmp_path, free_space_floor=2**62)
    async with gateway(tmp_path, store=store) as gate:
        gate.engine.handler = answering(chat([5, 6], [-0.1, -0.2]))
        assert (await gate.post(CHAT, BODY)).status == 200
        [(reason, detail)] = await gate.flags()
        assert reason == "store_failed"
        assert "StorageFullError" in detail
        assert await gate.store.read_entries("r1") == ()
        assert await masked(gate)
    async with gateway(tmp_path) as gate:
        gate.engine.handler = answering(chat([5, 6], [-0.1, -0.2]))
        assert (await gate.post(CHAT, BODY, rollout="r2")).status == 200
        assert not await masked(gate, "r2")
