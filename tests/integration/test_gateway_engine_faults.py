"""Engines that refuse, vanish, hang up or break off, and what is recorded."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from support.made_up import BODY, CHAT, FIRST, STREAM, answering, chat, delta, events, streaming, usage
from support.replay import Gateway, Recording, running_gateway


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path) as running:
        yield running


async def masked(gateway: Gateway, rollout: str = "r1") -> bool:
    return (await gateway.store.freeze(rollout)).incomplete


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
