"""What a call is sorted by is what the engine gets, and no call is sent before it is recorded."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from support.made_up import BODY, CHAT, answering, chat
from support.replay import Gateway, running_gateway, until

RAW = orjson.dumps(BODY)


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path) as running:
        yield running


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[],"x":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b'{"messages":[],"seed":' + b"9" * 5_000 + b"}",
        b"{",
        b"",
    ],
    ids=["nesting", "digits", "broken", "empty"],
)
async def test_a_call_is_recorded_before_the_engine_sees_it_whatever_its_body(gateway: Gateway, body: bytes) -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def handler(request: web.Request) -> web.Response:
        asked.set()
        await go_on.wait()
        return web.json_response(chat([5], [-0.1]))

    gateway.engine.handler = handler
    call = asyncio.create_task(gateway.post(CHAT, body))
    async with asyncio.timeout(60):
        await asked.wait()
    assert await gateway.intents() == [None]
    go_on.set()
    assert (await call).status == 200
    assert await gateway.flags() == [("uncaptured_endpoint", "a body that cannot be read here")]


HOST = (b"host", b"127.0.0.1")


async def asked(gateway: Gateway, **changes: Any) -> tuple[int, dict[bytes, bytes]]:
    """Call the application as a server would whose parser lets everything through; the status and the headers."""
    path = gateway.base().removeprefix(gateway.url) + CHAT
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [HOST, (b"content-length", str(len(RAW)).encode())],
        "server": ("127.0.0.1", 80),
        **changes,
    }
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": RAW}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await gateway.app(scope, receive, send)
    return sent[0]["status"], dict(sent[0]["headers"])


@pytest.mark.parametrize(
    "changes",
    [
        {"path": "/v1/chat/completions#/tokenize", "raw_path": b"/v1/chat/completions#/tokenize"},
        {"query_string": b"a=b#/tokenize"},
        {"method": "CONNECT"},
        {"path": "*", "raw_path": b"*"},
        {"headers": [HOST, (b"content-length", b"5"), (b"transfer-encoding", b"chunked")]},
        {"headers": [HOST, (b"transfer-encoding", b"gzip, chunked")]},
        {"headers": [HOST, (b"content-length", b"5"), (b"upgrade", b"h2c")]},
    ],
    ids=["fragment", "fragment of the query", "CONNECT", "no path", "two lengths", "unknown coding", "upgrade"],
)
async def test_what_two_servers_may_read_differently_is_refused_and_the_connection_closed(
    gateway: Gateway, changes: dict[str, Any]
) -> None:
    status, headers = await asked(gateway, **changes)
    assert (status, headers[b"connection"]) == (400, b"close")
    assert gateway.engine.received == []


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:8400", None, 200),
        ("localhost:8400", None, 200),
        ("[::1]:8400", None, 200),
        ("gateway", None, 200),
        ("host.docker.internal:8400", None, 200),
        ("tokcap.example.com", None, 200),  # one of the allowed hosts
        ("localhost:8400", "http://localhost:3000", 200),
        ("evil.example", None, 403),
        ("127.0.0.1.evil.example:8400", None, 403),
        ("evil.example", "http://evil.example", 403),
        ("127.0.0.1:8400", "http://evil.example", 403),
        ("127.0.0.1:8400", "null", 403),
        ("127.0.0.1:8400", "http://localhost.evil.example", 403),
    ],
)
async def test_a_web_page_cannot_write_into_a_rollout(
    tmp_path: Path, host: str, origin: str | None, status: int
) -> None:
    async with running_gateway(tmp_path, allowed_hosts=("tokcap.example.com",)) as gateway:
        gateway.engine.handler = answering(chat([5], [-0.1]))
        headers = {"host": host, **({"origin": origin} if origin is not None else {})}
        assert (await gateway.post(CHAT, BODY, **headers)).status == status
        assert len(await gateway.store.list_rollouts()) == (status == 200)
        assert (await gateway.request("GET", gateway.url + "/healthz", headers=headers)).status == 200


@pytest.mark.parametrize("filler", [b"{},", b"[],", b"0,"])
async def test_a_body_of_millions_of_values_is_refused_before_it_is_parsed(gateway: Gateway, filler: bytes) -> None:
    gateway.engine.handler = answering(chat([5], [-0.1]))
    body = b'{"messages":[' + filler * (20_000_000 // len(filler)) + b"0]}"
    for sent, coding in ((body, "identity"), (gzip.compress(body, 1), "gzip")):
        response = await gateway.post(CHAT, sent, **{"content-encoding": coding})
        assert (response.status, response.json()["error"]["code"]) == (413, "too_many_values")
    assert gateway.engine.received == []


async def test_bytes_in_flight_are_limited_and_given_back(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, body_bytes_in_flight=1_000) as gateway:
        seen, go_on = asyncio.Event(), asyncio.Event()

        async def handler(request: web.Request) -> web.Response:
            seen.set()
            await go_on.wait()
            return web.json_response(chat([5], [-0.1]))

        gateway.engine.handler = handler
        held = asyncio.create_task(gateway.post(CHAT, RAW + b" " * 800))
        async with asyncio.timeout(60):
            await seen.wait()
        refused = await gateway.post(CHAT, RAW + b" " * 800)
        assert (refused.status, refused.json()["error"]["code"]) == (503, "too_many_bytes")
        assert "retry-after" in dict(refused.headers)
        go_on.set()
        assert (await held).status == 200
        assert (await gateway.post(CHAT, RAW + b" " * 800)).status == 200


async def test_a_body_that_is_announced_too_long_is_not_waited_for(gateway: Gateway) -> None:
    status, _ = await asked(gateway, headers=[HOST, (b"content-length", b"68157440")])
    assert status == 413


async def test_an_engine_that_changes_the_protocol_is_a_502(gateway: Gateway) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.write(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nx")
        request.transport.close()
        return web.Response()

    gateway.engine.handler = handler
    assert (await gateway.post(CHAT, BODY)).status == 502
    assert [reason for reason, _ in await gateway.flags()] == ["unknown_outcome"]


async def test_a_redirection_is_kept_without_its_user_and_query(gateway: Gateway) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=307, headers={"location": "http://user:secret@engine:8000/v1/x?key=secret#secret"})

    gateway.engine.handler = handler
    url = gateway.base() + CHAT
    async with gateway.session.post(url, data=RAW, allow_redirects=False) as response:
        assert response.status == 307
    assert await gateway.flags() == [("uncaptured_endpoint", "HTTP 307 to http://engine:8000/v1/x")]


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", gzip.compress(RAW)),
        ("GZIP", gzip.compress(RAW[:5]) + gzip.compress(RAW[5:])),
        ("deflate", zlib.compress(RAW)),
        ("identity", RAW),
        ("gzip, gzip", gzip.compress(gzip.compress(RAW))),
    ],
)
async def test_a_compressed_request_is_captured_and_sent_on_plain(gateway: Gateway, coding: str, body: bytes) -> None:
    gateway.engine.handler = answering(chat([5], [-0.1]))
    response = await gateway.post(CHAT, body, **{"content-encoding": coding})
    assert response.status == 200
    assert len((await gateway.entry()).generation_token_ids) == 1
    received = gateway.engine.received[-1]
    assert received.json()["messages"] == BODY["messages"]
    assert coding == "identity" or "content-encoding" not in {name.lower() for name, _ in received.headers}


@pytest.mark.parametrize(
    ("coding", "body", "status", "code"),
    [
        ("zstd", b"\x28\xb5\x2f\xfd", 415, "unsupported_coding"),
        ("gzip", RAW, 400, "invalid_coding"),
        ("gzip", gzip.compress(RAW)[:-9], 400, "invalid_coding"),
        ("gzip", gzip.compress(bytes(20_000_000)), 413, "request_too_large"),
    ],
)
async def test_a_request_that_cannot_be_decompressed_is_refused_and_leaves_nothing_behind(
    tmp_path: Path, coding: str, body: bytes, status: int, code: str
) -> None:
    async with running_gateway(tmp_path, body_limit=1_000_000) as gateway:
        response = await gateway.post(CHAT, body, **{"content-encoding": coding})
        assert (response.status, response.json()["error"]["code"]) == (status, code)
        assert gateway.engine.received == []
        assert await gateway.store.list_rollouts() == []


@pytest.mark.parametrize("path", ["/abort_requests", "/pause?mode=wait"])
async def test_what_an_engine_is_told_marks_no_rollout(gateway: Gateway, path: str) -> None:
    gateway.engine.handler = answering({"ok": True})
    assert (await gateway.post(path, {})).status == 200
    assert await gateway.store.list_rollouts() == []


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "GET"])
async def test_methods_that_only_ask_mark_no_rollout(gateway: Gateway, method: str) -> None:
    gateway.engine.handler = answering({"ok": True})
    await gateway.request(method, gateway.base() + CHAT)
    assert await gateway.store.list_rollouts() == []
    assert await until(lambda: asyncio.sleep(0, gateway.engine.received))
