"""Agents never see the token ids that were asked for on their behalf, whatever else the engine does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from support.made_up import BODY, CHAT, FIRST, STREAM, answering, chat, delta, events, streaming, usage
from support.replay import Gateway, running_gateway

PROMPT, GENERATED = [41001, 41002, 41003], [42001, 42002]
IDS = [str(token).encode() for token in (*PROMPT, *GENERATED)]
WHOLE = {**chat(GENERATED, [-0.1, -0.2]), "prompt_token_ids": PROMPT}
DEEP = b"[" * 10_000 + b"]" * 10_000


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path) as running:
        yield running


def saying(payload: bytes, status: int = 200, **headers: str) -> Any:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=payload, status=status, content_type="application/json", headers=headers)

    return handler


def assert_hidden(body: bytes) -> None:
    assert not [token for token in IDS if token in body], body[:300]


@pytest.mark.parametrize(
    "payload",
    [
        orjson.dumps(WHOLE)[:-1] + b',"x":' + DEEP + b"}",
        b"\xef\xbb\xbf" + orjson.dumps(WHOLE),
        orjson.dumps(WHOLE).replace(b"hi", b"\xff"),
        orjson.dumps(WHOLE)[:-1],
        orjson.dumps(WHOLE).decode().encode("utf-16"),
        orjson.dumps([WHOLE]),
    ],
    ids=["nesting", "byte order mark", "no text", "cut off", "utf-16", "array"],
)
async def test_a_response_that_cannot_be_read_is_not_passed_on(gateway: Gateway, payload: bytes) -> None:
    gateway.engine.handler = saying(payload)
    response = await gateway.post(CHAT, BODY)
    assert (response.status, response.json()["error"]["code"]) == (502, "unreadable_response")
    assert_hidden(response.body)
    assert [reason for reason, _ in await gateway.flags()] == ["invalid_tokens"]


async def test_a_response_with_nan_is_read_and_passed_on_without_its_ids(gateway: Gateway) -> None:
    gateway.engine.handler = saying(orjson.dumps(WHOLE).replace(b"-0.2", b"NaN"))
    response = await gateway.post(CHAT, BODY)
    assert (response.status, response.json()["prompt_token_ids"]) == (200, None)
    assert_hidden(response.body)
    assert [reason for reason, _ in await gateway.flags()] == ["invalid_tokens"]


@pytest.mark.parametrize("status", [200, 400, 404, 500, 503])
async def test_an_error_with_ids_is_passed_on_without_them(gateway: Gateway, status: int) -> None:
    error = {"error": {"message": "no"}, **({} if status == 200 else WHOLE), "prompt_token_ids": PROMPT}
    gateway.engine.handler = answering(error, status)
    response = await gateway.post(CHAT, BODY)
    assert (response.status, response.json()["error"]) == (status, {"message": "no"})
    assert_hidden(response.body)


@pytest.mark.parametrize(
    "handler",
    [saying(b"prompt_token_ids: [41001]", 404), saying(orjson.dumps(WHOLE), 404, **{"content-encoding": "gzip"})],
)
async def test_an_error_that_cannot_be_read_keeps_its_status_alone(gateway: Gateway, handler: Any) -> None:
    gateway.engine.handler = handler
    response = await gateway.post(CHAT, BODY)
    assert (response.status, response.json()["error"]["code"]) == (404, "unreadable_response")
    assert_hidden(response.body)


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"prompt_token_ids":[41001,41002],"choices":[]\n\n',
        b"data: " + orjson.dumps({"error": {"message": "no"}, "prompt_token_ids": PROMPT}) + b"\n\n",
        b'data: {"prompt_token_ids":[41001],"choices":[],"x":' + DEEP + b"}\n\n",
        b'data: {"prompt_token_ids":[41001',
    ],
    ids=["broken", "error", "nesting", "unfinished"],
)
async def test_no_event_of_a_stream_shows_them(gateway: Gateway, event: bytes) -> None:
    gateway.engine.handler = streaming(*events(FIRST, delta(GENERATED[:1]), done=False), event)
    response = await gateway.post(CHAT, STREAM)
    assert_hidden(response.body)
    assert len(await gateway.flags()) == 1


async def test_a_stream_that_lacks_an_event_does_not_look_whole(gateway: Gateway) -> None:
    event = b'data: {"prompt_token_ids":[41001],"choices":[]\n\n'
    first, *rest = events(FIRST, delta([10], "stop"), usage(1))
    gateway.engine.handler = streaming(first, event, *rest)
    response = await gateway.post(CHAT, STREAM)
    assert_hidden(response.body)
    assert not response.whole
    assert [reason for reason, _ in await gateway.flags()] == ["invalid_tokens"]


async def test_two_prompts_in_a_stream_are_none(gateway: Gateway) -> None:
    gateway.engine.handler = streaming(
        *events(FIRST, delta([10], prompt_token_ids=[1, 2, 4]), delta([11], "stop"), usage(2))
    )
    await gateway.post(CHAT, STREAM)
    assert await gateway.flags() == [("invalid_tokens", "choice 0: the response names two different prompts")]
