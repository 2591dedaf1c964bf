"""What HTTP lets the two ends do: old versions, chunks, compression, redirections, and peers that stand still."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from support.made_up import BODY, CHAT, FIRST, STREAM, answering, chat, delta, events, usage
from support.replay import Gateway, running_gateway

WHOLE = orjson.dumps(chat([5, 6], [-0.1, -0.2]))
EVENTS = events(FIRST, delta([10]), delta([11], "stop"), usage(2))


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path) as running:
        yield running


@contextlib.asynccontextmanager
async def raw_engine(answer: bytes | None) -> AsyncIterator[str]:
    """Reads a request, answers with these bytes and closes; without any it reads nothing."""
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if answer is None:
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            await over.wait()
        else:
            head = await reader.readuntil(b"\r\n\r\n")
            (length,) = [int(line[15:]) for line in head.lower().splitlines() if line.startswith(b"content-length:")]
            await reader.readexactly(length)
            writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        over.set()


@pytest.mark.parametrize(
    ("kind", "payload", "outcome"),
    [
        ("application/json", WHOLE, "captured"),
        ("text/event-stream", b"".join(EVENTS), "captured"),
        ("text/event-stream", b"".join(EVENTS[:2]), "lost_stream"),
        ("application/json", WHOLE[:-9], "invalid_tokens"),
    ],
)
async def test_an_engine_that_ends_its_responses_by_closing_is_understood(
    tmp_path: Path, kind: str, payload: bytes, outcome: str
) -> None:
    answer = f"HTTP/1.0 200 OK\r\nContent-Type: {kind}\r\n\r\n".encode() + payload
    async with raw_engine(answer) as url, running_gateway(tmp_path, upstream=url) as gateway:
        response = await gateway.post(CHAT, STREAM if kind == "text/event-stream" else BODY)
        # A stream without its end must not look whole, and what cannot be read is not passed on.
        status = 502 if outcome == "invalid_tokens" else 200
        assert (response.status, response.whole) == (status, outcome != "lost_stream")
        assert [reason for reason, _ in await gateway.flags()] == ([] if outcome == "captured" else [outcome])
        assert len(await gateway.store.read_entries("r1")) == (outcome == "captured")


async def test_a_request_in_chunks_reaches_the_engine_whole_and_is_captured(gateway: Gateway) -> None:
    gateway.engine.handler = answering(chat([5], [-0.1]))
    body = orjson.dumps({**BODY, "messages": [{"role": "user", "content": "é字🙂" * 50}]})

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 7):
            yield body[start : start + 7]

    async with gateway.session.post(gateway.base() + CHAT, data=pieces()) as response:
        assert response.status == 200
    (received,) = gateway.engine.received
    assert ("content-length", str(len(received.body))) in [(name.lower(), value) for name, value in received.headers]
    assert received.json()["messages"] == orjson.loads(body)["messages"]
    assert len((await gateway.entry()).generation_token_ids) == 1


@pytest.mark.parametrize(("kind", "payload"), [("application/json", WHOLE), ("text/event-stream", b"".join(EVENTS))])
async def test_a_response_that_is_compressed_all_the_same_is_marked_and_not_passed_on(
    gateway: Gateway, kind: str, payload: bytes
) -> None:
    packed = gzip.compress(payload)

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": kind, "Content-Encoding": "gzip"})
        await response.prepare(request)
        for start in range(0, len(packed), 50):
            await response.write(packed[start : start + 50])
        return response

    gateway.engine.handler = handler
    seen = await gateway.post(CHAT, STREAM if kind == "text/event-stream" else BODY)
    assert (seen.status, seen.json()["error"]["code"]) == (502, "unreadable_response")
    assert await gateway.flags() == [
        ("invalid_tokens", "the response cannot be read: it is compressed (gzip), though it was asked for plain")
    ]
    assert await gateway.intents() == [None]


@pytest.mark.parametrize(
    ("path", "body", "what"),
    [
        (CHAT, orjson.dumps(BODY), ""),
        (CHAT + "/", orjson.dumps(BODY), f"POST {CHAT}/: "),
        ("/v1/audio/speech", orjson.dumps(BODY), "POST /v1/audio/speech: "),
        (CHAT, b"nonsense", "a body that cannot be read here: "),
    ],
)
async def test_a_client_that_is_sent_elsewhere_may_generate_there_so_the_rollout_is_masked(
    gateway: Gateway, path: str, body: bytes, what: str
) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=307, headers={"Location": "http://engine:8000/v1/chat/completions"})

    gateway.engine.handler = handler
    async with gateway.session.post(gateway.base() + path, data=body, allow_redirects=False) as response:
        assert (response.status, response.headers["location"]) == (307, "http://engine:8000/v1/chat/completions")
    told = f"{what}HTTP 307 to http://engine:8000/v1/chat/completions"
    assert await gateway.flags() == [("uncaptured_endpoint", told)]
    assert (await gateway.store.freeze("r1")).incomplete


async def test_a_redirection_of_what_generates_nothing_marks_nothing(gateway: Gateway) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=307, headers={"location": "/v1/models"})

    gateway.engine.handler = handler
    async with gateway.session.get(gateway.base() + "/v1/models/", allow_redirects=False) as response:
        assert response.status == 307
    assert await gateway.store.list_rollouts() == []


async def test_a_request_that_stops_halfway_is_a_408_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, client_timeout=0.2) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
        path = gateway.base().removeprefix(gateway.url) + CHAT
        writer.write(f"POST {path} HTTP/1.1\r\nHost: g\r\nContent-Length: 100\r\n\r\n{{".encode())
        async with asyncio.timeout(60):
            head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()
        assert head.startswith(b"HTTP/1.1 408")
        assert gateway.engine.received == []
        assert await gateway.store.list_rollouts() == []


async def test_a_body_beyond_the_limit_is_a_413_and_no_call(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, body_limit=1000) as gateway:
        gateway.engine.handler = answering(chat([5], [-0.1]))
        assert (await gateway.post(CHAT, b" " * 800 + orjson.dumps(BODY))).status == 200
        for body in (b" " * 1001, b" " * 3_000_000):
            response = await gateway.post(CHAT, body, rollout="large")
            assert (response.status, response.json()["error"]["code"]) == (413, "request_too_large")
            assert "TOKCAP_BODY_LIMIT" in response.json()["error"]["message"]
        assert (
            'tokcap_requests_refused_total{code="request_too_large"} 2.0'
            in (await gateway.request("GET", gateway.url + "/metrics")).body.decode()
        )
        assert len(gateway.engine.received) == 1
        (summary,) = await gateway.store.list_rollouts()
        assert (summary.rollout_id, summary.open_intents, summary.flags) == ("r1", 0, 0)


async def test_an_engine_that_stands_still_and_takes_no_request_is_a_504_and_the_outcome_unknown(
    tmp_path: Path,
) -> None:
    # More than both sockets take in, so that the request is never sent whole.
    body: dict[str, Any] = {**BODY, "messages": [{"role": "user", "content": "x" * 12_000_000}]}
    async with (
        raw_engine(None) as url,
        running_gateway(tmp_path, upstream=url, connect_timeout=0.1, read_timeout=0.3) as gateway,
    ):
        assert (await asyncio.wait_for(gateway.post(CHAT, body), 60)).status == 504
        ((reason, detail),) = await gateway.flags()
        assert (reason, detail) == ("unknown_outcome", f"{url} sent nothing for 0.3 s")
        assert await gateway.intents() == [None]
