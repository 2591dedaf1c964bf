"""What is not captured passes through untouched, and what could have generated is never overlooked."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import orjson
import pytest
from aiohttp import web

from support.made_up import BODY, CHAT, STREAM, answering, chat
from support.replay import Gateway, Recording, replay_engine, running_gateway, serving, stream
from token_id_capture.errors import ConfigurationError, UnknownRolloutError
from token_id_capture.server.app import create_app
from token_id_capture.server.http.upstream import parse_upstream


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path) as running:
        yield running


HARMLESS = (
    "21-models",
    "21b-version",
    "21c-health",
    "22-tokenize-messages",
    "22c-tokenize-prompt",
    "22d-detokenize",
    "22e-render",
    "20c-messages-count-tokens",
    "18g-error-method",
)
UNCAPTURED = (
    # Of an engine that nobody named, only OpenAI's endpoints are captured.
    "23-generate",
    "23b-generate-stream",
)


async def test_requests_that_generate_nothing_pass_through_and_mark_nothing(gateway: Gateway) -> None:
    for name in HARMLESS:
        recording = Recording.named(name)
        response = await gateway.replay(name, recording.sent)
        assert (response.status, response.body) == (recording.status, recording.payload), name
    assert await gateway.store.list_rollouts() == []


async def test_calls_that_generate_elsewhere_pass_through_and_mark_the_rollout(gateway: Gateway) -> None:
    for name in UNCAPTURED:
        recording = Recording.named(name)
        response = await gateway.replay(name, recording.sent, rollout=name)
        assert (response.status, response.body) == (200, recording.payload), name
        assert gateway.engine.received[-1].body == recording.sent
        # The client has just seen the end; the mark is there already.
        assert await gateway.flags(name) == [("uncaptured_endpoint", f"POST {recording.path}")]
        assert (await gateway.store.freeze(name)).incomplete


async def test_the_mark_of_an_uncaptured_call_is_durable_before_the_client_sees_its_end(gateway: Gateway) -> None:
    go_on = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"begun")
        await go_on.wait()
        return response

    gateway.engine.handler = handler
    async with gateway.session.post(gateway.base() + "/v1/inference", json=BODY) as response:
        assert await response.content.readany() == b"begun"
        assert await gateway.flags() == [("uncaptured_endpoint", "POST /v1/inference")]
        go_on.set()
        await response.read()


async def test_an_uncaptured_call_that_is_refused_or_fails_says_so(gateway: Gateway) -> None:
    response = await gateway.replay("18h-error-no-route", rollout="refused")
    assert response.status == 404
    assert await gateway.intents("refused") == ["refused"]
    assert not (await gateway.store.freeze("refused")).incomplete
    gateway.engine.handler = answering({"error": "broken"}, 500)
    await gateway.post("/v1/inference", BODY, rollout="failed")
    assert await gateway.flags("failed") == [("unknown_outcome", "POST /v1/inference: HTTP 500")]


async def test_traffic_without_a_rollout_is_untouched_and_unrecorded(gateway: Gateway) -> None:
    for prefix in ("", "/ng-rollout/r1"):
        recording = Recording.named("17-chat-nothing-asked")
        headers = {"x-recording": recording.name, "content-type": "application/json"}
        url = f"{gateway.url}{prefix}{recording.path}"
        response = await gateway.request("POST", url, recording.sent, headers)
        assert (response.status, response.body) == (200, recording.payload)
        assert gateway.engine.received[-1].body == recording.sent
    assert await gateway.store.list_rollouts() == []


async def test_a_rollout_does_not_reach_later_requests_on_its_connection(gateway: Gateway) -> None:
    gateway.engine.handler = answering(chat([5], [-0.1]))
    # A long body pauses and resumes the connection, to which asyncio then binds the request's context.
    body = {**BODY, "messages": [{"role": "user", "content": "x" * 500_000}]}
    for _ in range(5):
        await gateway.post(CHAT, body)
        await gateway.request("POST", gateway.url + CHAT, orjson.dumps(body))
        await gateway.request("POST", f"{gateway.url}/ng-rollout/r2{CHAT}", orjson.dumps(body))
    (summary,) = await gateway.store.list_rollouts()
    assert (summary.rollout_id, summary.calls, summary.flags) == ("r1", 5, 0)
    assert [b"return_token_ids" in received.body for received in gateway.engine.received] == [True, False, False] * 5


async def test_an_entry_says_which_engine_served_it(gateway: Gateway) -> None:
    gateway.engine.handler = answering(chat([5], [-0.1]))
    await gateway.post(CHAT, BODY)
    assert (await gateway.entry()).upstream == gateway.engine.url
    (call,) = (await gateway.store.describe_rollout("r1")).calls
    assert call.upstream == gateway.engine.url


async def test_with_capture_off_the_prefix_goes_and_nothing_is_added(tmp_path: Path) -> None:
    async with replay_engine() as engine, serving(create_app(engine.url, None)) as (url, _):
        gateway = Gateway(url, engine, None, None, None, None)  # type: ignore[arg-type]
        async with aiohttp.ClientSession() as gateway.session:
            engine.handler = answering({"ok": True})
            assert (await gateway.post(CHAT, BODY)).json() == {"ok": True}
        assert engine.received[-1].target == CHAT
        assert engine.received[-1].body == orjson.dumps(BODY)


async def test_headers_and_target_reach_the_engine_as_the_client_wrote_them(gateway: Gateway) -> None:
    gateway.engine.handler = answering({})
    target = "/v1/models/a%2Fb%20c;v=1?q=%C3%A9&x=1+2&x"
    raw = (
        f"GET /ng-rollout/r1/training-token-capture{target} HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer k\r\n"
        "X-Twice: 1\r\nX-Twice: 2\r\nX-Session-Id: caf\u00e9\r\n"
        "Connection: close, X-Private\r\nX-Private: 1\r\nTE: trailers\r\n\r\n"
    )
    assert (await sent_raw(gateway, raw.encode())).startswith(b"HTTP/1.1 200")
    received = gateway.engine.received[-1]
    assert received.target == target
    named = [(name.lower(), value) for name, value in received.headers]
    assert ("authorization", "Bearer k") in named
    assert [value for name, value in named if name == "x-twice"] == ["1", "2"]
    assert ("x-session-id", "caf\u00e9") in named
    assert not {"x-private", "te", "accept-encoding", "user-agent", "accept"} & {name for name, _ in named}
    assert dict(named)["host"] != "gateway"


async def sent_raw(gateway: Gateway, request: bytes) -> bytes:
    """Send bytes, and read until the gateway closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    writer.write(request)
    async with asyncio.timeout(60):
        response = await reader.read()
    writer.close()
    await writer.wait_closed()
    return response


async def test_responses_keep_their_headers_coding_and_bytes(gateway: Gateway) -> None:
    packed = gzip.compress(b"x" * 1000)

    async def handler(request: web.Request) -> web.Response:
        headers = {"content-encoding": "gzip", "x-request-id": "7", "keep-alive": "timeout=5", "location": "/elsewhere"}
        response = web.Response(body=packed, status=307, headers=headers)
        response.headers.add("set-cookie", "a=1")
        response.headers.add("set-cookie", "b=2")
        return response

    gateway.engine.handler = handler
    for url in (gateway.url + "/v1/models", gateway.base() + "/v1/models"):
        async with gateway.session.get(url, allow_redirects=False) as response:
            assert (response.status, await response.read()) == (307, packed)
            headers = response.headers
        assert (headers["content-encoding"], headers["x-request-id"], headers["location"]) == (
            "gzip",
            "7",
            "/elsewhere",
        )
        assert headers.getall("set-cookie") == ["a=1", "b=2"]
        assert headers.getall("content-length") == [str(len(packed))]
        assert len(headers.getall("date")) == len(headers.getall("server")) == 1
        assert "keep-alive" not in headers


async def test_a_captured_call_asks_for_a_response_without_compression(gateway: Gateway) -> None:
    gateway.engine.handler = answering(chat([5], [-0.1]))
    await gateway.post(CHAT, BODY, **{"accept-encoding": "gzip, br"})
    assert [value for name, value in gateway.engine.received[-1].headers if name.lower() == "accept-encoding"] == [
        "identity"
    ]
    await gateway.post("/tokenize", BODY, **{"accept-encoding": "gzip, br"})
    assert [value for name, value in gateway.engine.received[-1].headers if name.lower() == "accept-encoding"] == [
        "gzip, br"
    ]


async def test_a_head_request_of_the_base_url_is_answered(gateway: Gateway) -> None:
    gateway.engine.handler = answering({"hello": True})
    for method in ("HEAD", "GET", "OPTIONS"):
        for url in (gateway.base(), gateway.base() + "/"):
            response = await gateway.request(method, url)
            assert response.status == 200
            assert gateway.engine.received[-1].target == "/"
    head = await gateway.request("HEAD", gateway.base())
    assert head.body == b""
    assert ("content-length", "14") in [(name.lower(), value) for name, value in head.headers]
    assert await gateway.store.list_rollouts() == []


@pytest.mark.parametrize("rollout", ["a%20b", "..%2F", "a%2Db", "-a", "r" * 201])
async def test_a_malformed_rollout_id_is_a_400_and_reaches_nobody(gateway: Gateway, rollout: str) -> None:
    request = (
        f"POST /ng-rollout/{rollout}/training-token-capture{CHAT} HTTP/1.1\r\nHost: g\r\nConnection: close\r\n\r\n"
    )
    response = await sent_raw(gateway, request.encode())
    assert response.startswith(b"HTTP/1.1 400")
    assert b'"invalid_rollout_id"' in response
    assert gateway.engine.received == []


@pytest.mark.parametrize("target", ["*", "@127.0.0.2/", ":1/"])
async def test_a_target_that_is_no_path_cannot_lead_elsewhere(gateway: Gateway, target: str) -> None:
    response = await sent_raw(gateway, f"OPTIONS {target} HTTP/1.1\r\nHost: g\r\nConnection: close\r\n\r\n".encode())
    assert response.startswith(b"HTTP/1.1 400")
    assert gateway.engine.received == []


async def test_a_target_that_names_another_server_is_asked_of_the_engine(gateway: Gateway) -> None:
    gateway.engine.handler = answering({"ok": True})
    target = "http://127.0.0.2:1/v1/models"
    response = await sent_raw(gateway, f"OPTIONS {target} HTTP/1.1\r\nHost: g\r\nConnection: close\r\n\r\n".encode())
    # RFC 9112, section 3.2.2, wants such a target to be understood; one of the two parsers refuses it.
    assert response.startswith((b"HTTP/1.1 200", b"HTTP/1.1 400"))
    assert {received.target for received in gateway.engine.received} <= {"/v1/models"}


@pytest.mark.parametrize("prefix", ["", "/ng-rollout/r1", "/ng-rollout/r1/training-token-capture"])
async def test_a_websocket_handshake_gets_426_on_every_path(gateway: Gateway, prefix: str) -> None:
    handshake = (
        f"GET {prefix}/v1/inference HTTP/1.1\r\nHost: g\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    writer.write(handshake.encode())
    async with asyncio.timeout(60):
        head = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    assert head.startswith(b"HTTP/1.1 426")
    assert gateway.engine.received == []


async def test_long_prompts_pass_in_both_directions(gateway: Gateway) -> None:
    prompt = list(range(100_000, 124_000))
    response = chat([5], [-0.1])
    response["prompt_token_ids"] = prompt
    gateway.engine.handler = answering(response)
    body = {**BODY, "messages": [{"role": "user", "content": "é" * 3_000_000}]}
    assert (await gateway.post(CHAT, body)).status == 200
    assert gateway.engine.received[-1].json()["messages"] == body["messages"]
    assert (await gateway.entry()).prompt_token_ids == prompt


async def test_an_upstream_below_a_path_and_one_that_ends_in_v1_are_both_understood(tmp_path: Path) -> None:
    async with replay_engine() as engine:
        engine.handler = answering({})
        for upstream, target in (
            (engine.url + "/v1/", "/v1/models"),
            (engine.url + "/engines/7/v1", "/engines/7/v1/models"),
        ):
            async with running_gateway(tmp_path, upstream=upstream) as gateway:
                await gateway.request("GET", gateway.base() + "/v1/models")
                assert engine.received[-1].target == target


@pytest.mark.parametrize("url", ["", "engine", "ftp://engine", "http://", "http://engine:99999", "http://engine/?a=1"])
def test_what_is_no_upstream_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="is not an upstream"):
        parse_upstream(url)


def test_an_unknown_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="choose one of auto, llama-cpp, message, sglang, vllm"):
        create_app("http://127.0.0.1:1", None, engine="llama")


async def test_the_gateway_has_no_way_to_read_tokens(gateway: Gateway) -> None:
    await gateway.replay("01-chat")
    gateway.engine.handler = answering({"detail": "Not Found"}, 404)
    for path in ("", "/", "/tokens", "/entries", "/captures"):
        assert (await gateway.request("GET", gateway.base() + path)).status == 404
    with pytest.raises(UnknownRolloutError):
        await gateway.store.describe_rollout("tokens")


async def test_a_stream_that_is_not_captured_is_passed_on_as_it_comes(gateway: Gateway) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, [b"data: a\n", b"\n: x\r\n", b"junk"])

    gateway.engine.handler = handler
    response = await gateway.request("POST", gateway.url + CHAT, orjson.dumps(STREAM))
    assert (response.body, response.whole) == (b"data: a\n\n: x\r\njunk", True)
