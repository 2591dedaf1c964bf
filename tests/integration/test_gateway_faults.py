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


async def test_a_malformed_body_is_the_engines_to_answer_and_no_hole(gateway: Gateway) -> None:
    recording = Recording.named("18e-error-malformed-json")
    response = await gateway.replay(recording.name, recording.sent)
    assert (response.status, response.body) == (400, recording.payload)
    assert gateway.engine.received[-1].body == recording.sent
    assert await gateway.intents() == ["refused"]
    assert not await masked(gateway)


@pytest.mark.parametrize("body", [b"[1]", b'"text"', b"{", b"\xff\xfe", b""])
async def test_a_body_that_no_parser_reads_but_the_engine_answers_is_marked(gateway: Gateway, body: bytes) -> None:
    gateway.engine.handler = answering(chat([5], [-0.1]))
    assert (await gateway.post(CHAT, body)).status == 200
    assert await gateway.flags() == [("uncaptured_endpoint", "a body that cannot be read here")]


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"messages":[],"temperature":NaN}',
        '{"messages":[{"role":"user","content":"é"}]}'.encode("utf-16"),
        b"\xef\xbb\xbf" + b'{"messages":[]}',
    ],
)
async def test_bodies_that_only_python_reads_are_captured_too(gateway: Gateway, body: bytes) -> None:
    import json

    gateway.engine.handler = answering(chat([5], [-0.1]))
    assert (await gateway.post(CHAT, body)).status == 200
    sent = json.loads(gateway.engine.received[-1].body)
    assert sent["return_token_ids"] is True
    assert repr(sent["messages"]) == repr(json.loads(body)["messages"])
    assert len((await gateway.entry()).generation_token_ids) == 1


@pytest.mark.parametrize("status", [500, 502, 504])
async def test_an_engine_error_leaves_the_intent_open_and_the_reason_in_one_select(
    gateway: Gateway, status: int
) -> None:
    gateway.engine.handler = answering({"error": {"message": "CUDA error", "type": "server_error"}}, status)
    response = await gateway.post(CHAT, BODY)
    assert (response.status, response.json()["error"]["message"]) == (status, "CUDA error")
    assert await gateway.flags() == [("unknown_outcome", f"HTTP {status}: CUDA error")]
    assert await gateway.intents() == [None]
    assert await masked(gateway)


@pytest.mark.parametrize("path", [CHAT, "/v1/anything"])
@pytest.mark.parametrize("status", [429, 503, 529])
async def test_an_engine_that_does_not_take_the_call_leaves_no_hole(gateway: Gateway, path: str, status: int) -> None:
    gateway.engine.handler = answering({"error": {"message": "no worker", "type": "overloaded"}}, status)
    assert (await gateway.post(path, BODY)).status == status
    assert await gateway.intents() == ["refused"]
    assert not await masked(gateway)


async def test_an_engine_that_is_not_there_is_a_502_and_no_hole(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with running_gateway(tmp_path, upstream=f"http://127.0.0.1:{port}") as gateway:
        for path in (CHAT, "/v1/inference"):
            response = await gateway.post(path, BODY)
            assert response.status == 502
            assert response.json()["error"]["message"] == "The engine cannot be reached."
        details = [intent.detail for intent in (await gateway.store.describe_rollout("r1")).intents]
        assert all(f"127.0.0.1:{port}" in str(detail) for detail in details)
        assert await gateway.intents() == ["refused", "refused"]
        assert not await masked(gateway)
        assert (await gateway.request("GET", gateway.base() + "/v1/models")).status == 502


async def test_an_engine_that_says_nothing_is_a_504_and_the_outcome_unknown(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, read_timeout=0.2) as gateway:
        released = asyncio.Event()

        async def handler(request: web.Request) -> web.Response:
            await released.wait()
            return web.Response()

        gateway.engine.handler = handler
        response = await gateway.post(CHAT, BODY)
        released.set()
        assert response.status == 504
        ((reason, detail),) = await gateway.flags()
        assert reason == "unknown_outcome"
        assert detail.endswith("sent nothing for 0.2 s")
        assert await gateway.intents() == [None]


async def test_an_engine_that_hangs_up_before_it_answers_is_a_502_and_the_outcome_unknown(gateway: Gateway) -> None:
    gateway.engine.handler = hanging_up()
    response = await gateway.post(CHAT, BODY)
    assert response.status == 502
    ((reason, _),) = await gateway.flags()
    assert reason == "unknown_outcome"
    assert await masked(gateway)


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


async def test_a_response_that_breaks_off_is_unknown(gateway: Gateway) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        response = web.StreamResponse(headers={"content-type": "application/json", "content-length": "1000"})
        await response.prepare(request)
        await response.write(b'{"id":')
        request.transport.close()
        return response

    gateway.engine.handler = handler
    assert (await gateway.post(CHAT, BODY)).status == 502
    assert [reason for reason, _ in await gateway.flags()] == ["unknown_outcome"]


async def test_a_stream_that_breaks_off_is_lost_and_the_clients_breaks_too(gateway: Gateway) -> None:
    sent = events(FIRST, delta([10]), done=False)
    gateway.engine.handler = hanging_up(*sent)
    response = await gateway.post(CHAT, {**STREAM, "logprobs": True, "return_token_ids": True})
    assert (response.status, response.body, response.whole) == (200, b"".join(sent), False)
    [(reason, detail)] = await gateway.flags()
    assert reason == "lost_stream"
    assert detail.startswith("the connection to http://127.0.0.1:")
    assert detail.endswith(" broke: it ended in the middle of a response; choice 0 has no finish reason")
    assert await gateway.intents() == [None]
    assert await gateway.store.read_entries("r1") == ()


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
    gateway: Gateway, chunks: list[bytes], detail: str
) -> None:
    gateway.engine.handler = streaming(*chunks)
    asked = {"logprobs": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    response = await gateway.post(CHAT, {**STREAM, **asked})
    assert response.body == b"".join(chunks)
    # Where the engine said [DONE] the client's response ends; else it breaks, and must not look whole.
    assert response.whole == chunks[-1].startswith(b"data: [DONE]")
    assert await gateway.flags() == [("lost_stream", detail)]
    assert await masked(gateway)


async def test_a_stream_without_its_last_line_is_whole_if_all_that_counts_was_there(gateway: Gateway) -> None:
    gateway.engine.handler = streaming(*events(FIRST, delta([10], "stop"), usage(1), done=False))
    assert (await gateway.post(CHAT, STREAM)).whole
    assert (await gateway.entry()).generation_token_ids == [10]
    assert not await masked(gateway)


async def test_an_error_inside_a_stream_is_passed_on_and_the_outcome_unknown(gateway: Gateway) -> None:
    sent = events(FIRST, delta([10]), {"error": {"message": "engine died", "code": 500}})
    gateway.engine.handler = streaming(*sent)
    response = await gateway.post(CHAT, {**STREAM, "logprobs": True, "return_token_ids": True})
    assert (response.body, response.whole) == (b"".join(sent), True)
    assert await gateway.flags() == [("unknown_outcome", "engine died")]
    assert await masked(gateway)


async def test_a_response_that_is_no_json_is_a_502_and_marked(gateway: Gateway) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=b"<html>", content_type="text/html")

    gateway.engine.handler = handler
    response = await gateway.post(CHAT, BODY)
    assert (response.status, response.json()["error"]["code"]) == (502, "unreadable_response")
    assert [reason for reason, _ in await gateway.flags()] == ["invalid_tokens"]


async def test_events_that_are_no_json_are_passed_on_and_marked(gateway: Gateway) -> None:
    sent = [b"data: nonsense\n\n", *events(FIRST, delta([10], "stop"), usage(1))]
    gateway.engine.handler = streaming(*sent)
    asked = {"logprobs": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    assert (await gateway.post(CHAT, {**STREAM, **asked})).body == b"".join(sent)
    assert [reason for reason, _ in await gateway.flags()] == ["invalid_tokens"]


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
