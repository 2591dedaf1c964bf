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
    async with asyncio.timeout(10):
        await asked.wait()
    assert await gateway.intents() == [None]
    go_on.set()
    assert (await call).status == 200
    assert await gateway.flags() == [("uncaptured_endpoint", "a body that cannot be read here")]


@pytest.mark.parametrize(("raw", "query"), [(b"#/tokenize", b""), (b"", b"a=b#/tokenize")])
async def test_a_target_with_a_fragment_is_refused(gateway: Gateway, raw: bytes, query: bytes) -> None:
    path = gateway.base().removeprefix(gateway.url).encode() + CHAT.encode() + raw
    scope = {
        "type": "http",
        "method": "POST",
        "path": path.decode(),
        "raw_path": path,
        "query_string": query,
        "headers": [(b"host", b"127.0.0.1")],
    }
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": RAW}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await gateway.app(scope, receive, send)
    assert sent[0]["status"] == 400
    assert gateway.engine.received == []


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


@pytest.mark.parametrize("path", ["/abort_requests", "/v1beta/models/m:countTokens", "/pause?mode=wait"])
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
