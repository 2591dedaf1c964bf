"""Clients of Messages, Responses and Gemini through the real gateway: captured as chat, answered in their dialect."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import orjson
import pytest
from aiohttp import web

from support.dialect_calls import (
    GEMINI,
    MESSAGES,
    MODEL,
    RESPONSES,
    answer_with,
    calls,
    contents,
    messages,
    responses,
)
from support.replay import Gateway, Recording, running_gateway, until
from token_id_capture.consumer import trajectories_from_source
from token_id_capture.rebuild import ScoredAnswer, build_snapshot
from token_id_capture.records import TokenEntry

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from google import genai
    from google.genai import types as gemini

KEY = "the-gateways-key"
RECORDED = {
    "whole": ("12c-tools-auto-text-and-call", "14h-reasoning-and-tool", "01-chat", "11-chat-length"),
    "streamed": (
        "13c-tools-auto-text-and-call-stream",
        "14i-reasoning-and-tool-stream",
        "02-chat-stream-usage",
        "11b-chat-length-stream",
    ),
}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path, model="policy") as running:
        yield running


def captured(entry: TokenEntry) -> tuple[Any, ...]:
    return (
        entry.prompt_token_ids,
        entry.generation_token_ids,
        entry.generation_log_probs,
        entry.output_items,
        entry.finish_reason,
        entry.response_id,
    )


@pytest.mark.parametrize("kind", RECORDED)
async def test_a_dialect_stores_what_the_same_generation_stores_over_chat(gateway: Gateway, kind: str) -> None:
    for name in RECORDED[kind]:
        answer_with(gateway, name)
        streamed = kind == "streamed"
        chat = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "stream": streamed}
        await gateway.post("/v1/chat/completions", chat, f"{name}-chat")
        expected = captured(await gateway.entry(f"{name}-chat"))
        for number, (path, body) in enumerate(calls(streamed)):
            rollout = f"{name}-{number}"
            response = await gateway.post(path, body, rollout)
            assert (response.status, response.whole) == (200, True)
            entry = await gateway.entry(rollout)
            assert captured(entry) == expected
            assert entry.translation is not None
            assert entry.translation.client_model in (MODEL, "g")
            assert entry.translation.client_response_id.encode() in response.body
            asked = gateway.engine.received[-1]
            assert (asked.target, asked.json()["model"]) == ("/v1/chat/completions", "policy")
            snapshot = await gateway.store.freeze(rollout)
            assert not snapshot.incomplete
            scored = ScoredAnswer(declared_response_id=entry.translation.client_response_id)
            assert build_snapshot(snapshot, scored=scored).deliverable


async def test_the_official_clients_read_whole_responses_and_streams(gateway: Gateway) -> None:
    base = gateway.base()
    claude = anthropic.AsyncAnthropic(base_url=base, api_key="key", max_retries=0)
    gpt = openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="key", max_retries=0)
    google = genai.Client(api_key="key", http_options=gemini.HttpOptions(base_url=base))
    arguments = orjson.loads(Recording.named("12c-tools-auto-text-and-call").payload)["choices"][0]["message"]
    text, (call,) = arguments["content"], arguments["tool_calls"]
    wanted = orjson.loads(call["function"]["arguments"])

    answer_with(gateway, "12c-tools-auto-text-and-call")
    asked: Any = {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": "hi"}]}
    message = await claude.messages.create(**asked)
    assert [block.type for block in message.content] == ["text", "tool_use"]
    assert (message.content[1].input, message.stop_reason, message.model) == (wanted, "tool_use", MODEL)
    response = await gpt.responses.create(model=MODEL, input="hi")
    assert (response.output_text, response.output[-1].arguments) == (text, call["function"]["arguments"])
    # Its asynchronous client derives from a class of aiohttp that warns of that.
    found = await asyncio.to_thread(google.models.generate_content, model="g", contents="hi")
    assert (found.function_calls[0].args, found.function_calls[0].id) == (wanted, call["id"])

    answer_with(gateway, "13c-tools-auto-text-and-call-stream")
    async with claude.messages.stream(**asked) as events:
        final = await events.get_final_message()
    assert (final.content[1].input, final.usage.output_tokens > 0) == (wanted, True)
    async with gpt.responses.stream(model=MODEL, input="hi") as updates:
        done = await updates.get_final_response()
    assert done.output[-1].arguments == call["function"]["arguments"]
    parts = await asyncio.to_thread(lambda: list(google.models.generate_content_stream(model="g", contents="hi")))
    assert parts[-1].function_calls[0].args == wanted
    assert len(await gateway.store.read_entries("r1")) == 6
    assert await gateway.flags() == []
    for client in (claude, gpt):
        await client.close()
    google.close()


async def test_a_request_that_comes_in_chunks_is_translated(gateway: Gateway) -> None:
    async def pieces(body: bytes) -> AsyncIterator[bytes]:
        yield body[:9]
        yield body[9:]

    answer_with(gateway, "01-chat")
    for path, body in calls(streamed=False):
        async with gateway.session.post(gateway.base() + path, data=pieces(orjson.dumps(body))) as response:
            assert response.status == 200
    assert len(await gateway.store.read_entries("r1")) == 3


async def test_an_end_is_not_seen_before_the_call_is_stored(gateway: Gateway) -> None:
    answer_with(gateway, "13c-tools-auto-text-and-call-stream")
    for number, (path, body) in enumerate(calls(streamed=True)):
        rollout = f"r{number}"
        async with gateway.session.post(gateway.base(rollout) + path, json=body) as response:
            seen = b""
            while not any(end in seen for end in (b"message_stop", b"response.completed", b"finishReason")):
                seen += await response.content.readany()
            assert len(await gateway.store.read_entries(rollout)) == 1


async def test_a_stream_that_breaks_breaks_and_is_flagged(gateway: Gateway) -> None:
    payload = Recording.named("13c-tools-auto-text-and-call-stream").payload
    half = payload[: len(payload) // 2]

    async def break_off(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(half)
        assert request.transport is not None
        request.transport.abort()
        return response

    gateway.engine.handler = break_off
    for number, (path, body) in enumerate(calls(streamed=True)):
        response = await gateway.post(path, body, f"r{number}")
        assert not response.whole
        assert b"message_stop" not in response.body
        assert b"response.completed" not in response.body
        assert b"finishReason" not in response.body
        assert [reason for reason, _ in await gateway.flags(f"r{number}")] == ["lost_stream"]


@pytest.mark.parametrize(
    ("status", "message", "kinds"),
    [
        (400, "no such option", ("invalid_request_error", "invalid_request_error", "INVALID_ARGUMENT")),
        (404, "no such model", ("not_found_error", "invalid_request_error", "NOT_FOUND")),
        (429, "too many", ("rate_limit_error", "invalid_request_error", "RESOURCE_EXHAUSTED")),
        (503, "busy", ("overloaded_error", "server_error", "UNAVAILABLE")),
    ],
)
async def test_an_error_of_the_engine_reaches_the_client_in_its_envelope(
    gateway: Gateway, status: int, message: str, kinds: tuple[str, str, str]
) -> None:
    async def fail(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": message, "type": "X", "code": status}}, status=status)

    gateway.engine.handler = fail
    for number, ((path, body), kind) in enumerate(zip(calls(streamed=True), kinds, strict=True)):
        response = await gateway.post(path, body, f"r{number}")
        error = response.json()["error"]
        assert (response.status, error["message"], error.get("status", error.get("type"))) == (status, message, kind)
        assert await gateway.intents(f"r{number}") == ["refused"]


async def test_a_prompt_that_is_too_long_starts_compaction_in_each_client(gateway: Gateway) -> None:
    answer_with(gateway, "18-error-too-long")
    response = await gateway.post(MESSAGES, messages(stream=True))
    assert response.json()["error"]["message"].startswith("prompt is too long: This model's maximum context length")
    plain = await gateway.post(RESPONSES, responses(stream=True))
    assert (plain.status, plain.json()["error"]["code"]) == (400, "context_length_exceeded")
    codex = await gateway.post(RESPONSES, responses(stream=True), originator="codex_exec")
    assert codex.status == 200
    assert b"event: response.failed" in codex.body
    assert b'"code":"context_length_exceeded"' in codex.body


async def test_a_closed_rollout_is_a_410_in_each_envelope(gateway: Gateway) -> None:
    answer_with(gateway, "01-chat")
    await gateway.post(MESSAGES, messages())
    await gateway.store.freeze("r1")
    for path, body in calls(streamed=False):
        response = await gateway.post(path, body)
        assert response.status == 410
        assert response.json()["error"]["message"]


@pytest.mark.parametrize(
    "sent",
    [
        {"authorization": f"Bearer {KEY}"},
        {"x-api-key": KEY},
        {"x-goog-api-key": KEY},
        {},
    ],
)
async def test_the_gateways_key_is_taken_where_each_client_sends_it_and_never_leaves(
    tmp_path: Path, sent: dict[str, str]
) -> None:
    async with running_gateway(tmp_path, api_key=KEY, model="policy") as gateway:
        answer_with(gateway, "01-chat")
        path = GEMINI if sent else f"{GEMINI}?key={KEY}"
        assert (await gateway.post(path, contents(), **sent)).status == 200
        asked = gateway.engine.received[-1]
        assert KEY not in asked.target
        assert not [value for _, value in asked.headers if KEY in value]
        refused = await gateway.post(f"{GEMINI}?key=other", contents())
        assert (refused.status, refused.json()["error"]["status"]) == (401, "UNAUTHENTICATED")
        refused = await gateway.post(MESSAGES, messages())
        assert (refused.status, refused.json()["error"]["type"]) == (401, "authentication_error")


async def test_a_clients_key_goes_to_the_engine_as_a_bearer_token(gateway: Gateway) -> None:
    answer_with(gateway, "01-chat")
    for headers, path in (({"x-api-key": "k"}, MESSAGES), ({"x-goog-api-key": "k"}, GEMINI), ({}, f"{GEMINI}?key=k")):
        body = messages() if path == MESSAGES else contents()
        headers = {**headers, "anthropic-version": "2023-06-01", "x-goog-api-client": "x", "openai-beta": "y"}
        await gateway.post(path, body, **headers)
        got = {name.lower(): value for name, value in gateway.engine.received[-1].headers}
        assert got["authorization"] == "Bearer k"
        assert not [name for name in got if name.startswith(("anthropic", "x-goog", "openai", "x-api"))]


@pytest.mark.parametrize(("status", "role"), [(400, "user"), (200, "system")])
async def test_the_engine_is_asked_once_whether_it_takes_system_messages_behind_others(
    gateway: Gateway, status: int, role: str
) -> None:
    recording = Recording.named("01-chat")
    asked: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        asked.append(body)
        if len(asked) == 1:
            return web.json_response({"error": {"message": "System message must be at the beginning."}}, status=status)
        return web.Response(body=recording.payload, content_type="application/json")

    gateway.engine.handler = answer
    body = messages()
    body["messages"] = [*body["messages"], {"role": "system", "content": "later"}, *body["messages"]]
    await asyncio.gather(*(gateway.post(MESSAGES, body) for _ in range(3)))
    assert [len(one["messages"]) for one in asked] == [3, 3, 3, 3]
    assert [one["max_tokens"] for one in asked[:1]] == [1]
    assert {one["messages"][1]["role"] for one in asked[1:]} == {role}


async def test_counting_tokens_generates_nothing_and_records_nothing(gateway: Gateway) -> None:
    async def count(request: web.Request) -> web.StreamResponse:
        assert (await request.json())["model"] == "policy"
        return web.json_response({"input_tokens": 5} if "count" in request.path else {"count": 5, "tokens": []})

    gateway.engine.handler = count
    assert (await gateway.post("/v1/messages/count_tokens?beta=true", messages())).json() == {"input_tokens": 5}
    assert (await gateway.post("/v1beta/models/g:countTokens", contents())).json() == {"totalTokens": 5}
    assert await gateway.store.list_rollouts() == []


async def test_agents_are_told_apart_by_what_their_harness_sends(gateway: Gateway) -> None:
    answer_with(gateway, "01-chat")
    session = {"x-claude-code-session-id": "s"}
    await gateway.post(MESSAGES, messages(), **session)
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    await gateway.post(MESSAGES, messages(tools=tools), **session, **{"x-claude-code-agent-id": "a1"})
    named = gateway.url + "/ng-rollout/r1/agent/planner/training-token-capture"
    await gateway.request("POST", named + RESPONSES, orjson.dumps(responses()), {"content-type": "application/json"})
    found = [(one.agent, one.parent_agent, one.offers_tools) for one in await gateway.store.read_entries("r1")]
    assert found == [("main", None, False), ("a1", "main", True), ("planner", "main", False)]


async def test_a_client_that_hangs_up_at_the_end_leaves_a_complete_call(gateway: Gateway) -> None:
    answer_with(gateway, "13c-tools-auto-text-and-call-stream")
    async with gateway.session.post(gateway.base() + RESPONSES, json=responses(stream=True)) as response:
        while b"response.completed" not in await response.content.readany():
            pass
        response.close()

    async def stored() -> bool:
        return len(await gateway.store.read_entries("r1")) == 1

    await until(stored)
    assert not (await gateway.store.freeze("r1")).incomplete


async def test_calls_of_no_rollout_pass_untouched(gateway: Gateway) -> None:
    answer_with(gateway, "01-chat")
    for path in ("/v1/messages", "/ng-rollout/r1/v1/messages"):
        await gateway.request("POST", gateway.url + path, orjson.dumps(messages()), {"x-api-key": "k"})
        assert gateway.engine.received[-1].target == "/v1/messages"
        assert gateway.engine.received[-1].json() == messages()


async def test_calls_of_no_rollout_are_told_of_once_and_counted(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    answer_with(gateway, "01-chat")
    paths = ("/v1/messages", "/ng-rollout/r1/v1/chat/completions", "/tokenize", "/v1/responses")
    for path in paths:
        await gateway.request("POST", gateway.url + path, orjson.dumps(messages()), {"x-api-key": "k"})
    told = [record.getMessage() for record in caplog.records if "not captured" in record.getMessage()]
    assert len(told) == 1
    assert "POST /v1/messages" in told[0]
    numbers = await gateway.request("GET", gateway.url + "/metrics", b"", {})
    assert b"tokcap_calls_untagged_total 3.0" in numbers.body


async def test_a_title_call_that_fails_costs_the_main_agent_nothing(gateway: Gateway) -> None:
    recording = Recording.named("01-chat")

    async def answer(request: web.Request) -> web.StreamResponse:
        if "tools" not in await request.json():
            return web.json_response({"error": {"message": "out of memory"}}, status=500)
        return web.Response(body=recording.payload, content_type="application/json")

    gateway.engine.handler = answer
    session = {"x-session-id": "s"}
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    assert (await gateway.post(RESPONSES, responses(), **session)).status == 500
    assert (await gateway.post(RESPONSES, responses(tools=tools), **session)).status == 200
    (flag,) = (await gateway.store.describe_rollout("r1")).flags
    assert (flag.origin.agent, flag.origin.offers_tools) == ("main", False)
    built = await trajectories_from_source("r1", gateway.store)
    assert (built["mask_sample"], built["reasons"]) == (False, [])
