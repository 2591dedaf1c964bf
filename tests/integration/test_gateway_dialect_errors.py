"""What clients of each dialect send wrongly, and what engines answer wrongly: an error in the envelope, each time."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from aiohttp import web

from support.dialect_calls import GEMINI, MESSAGES, RESPONSES, answer_with, calls, contents, messages, responses
from support.replay import Gateway, running_gateway

Bodies: TypeAlias = tuple[list[Any], ...]


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path, model="policy") as running:
        yield running


def bad_bodies() -> dict[str, list[Any]]:
    """What no dialect can take, and what each cannot: blocks, results without a call, depth, limits, no messages."""
    anywhere: list[Any] = [b"{", b"[]", b"{}", b'{"model":7,"contents":7}', b'{"max_tokens": NaN}', b"[" * 2000]
    nested = json.loads('{"a":' * 300 + "1" + "}" * 300)
    result = {"type": "tool_result", "tool_use_id": "none", "content": "x"}
    answer = {"functionResponse": {"name": "none", "response": {}}}
    turns: Bodies = ([], [{"role": "user", "content": [result]}], [{"role": "user", "content": [{"type": "hologram"}]}])
    items: Bodies = ([], [{"type": "function_call_output", "call_id": "none", "output": "x"}], [{"type": "hologram"}])
    parts: Bodies = ([], [{"parts": [answer]}], [{"parts": [{"hologram": {}}]}])
    limits = b'{"model":"m","max_tokens":1' + b"0" * 30 + b',"messages":[{"role":"user","content":"hi"}]}'
    return {
        MESSAGES: [
            *anywhere,
            limits,
            *(messages(messages=turn) for turn in turns),
            json.dumps(messages(tools=[{"name": "a", "input_schema": nested}])).encode(),
        ],
        RESPONSES: [
            *anywhere,
            *(responses(input=item) for item in items),
            json.dumps(responses(tools=[{"type": "function", "name": "a", "parameters": nested}])).encode(),
            json.dumps(responses(metadata=nested)).encode(),
        ],
        GEMINI: [
            *anywhere,
            *(contents(contents=part) for part in parts),
            contents(systemInstruction={"parts": []}, system_instruction={"parts": []}),
            json.dumps(contents(tools=[{"functionDeclarations": [{"name": "a", "parameters": nested}]}])).encode(),
        ],
    }


async def test_bad_input_is_refused_in_the_envelope_and_nothing_is_sent_or_recorded(gateway: Gateway) -> None:
    for path, bodies in bad_bodies().items():
        for body in bodies:
            response = await gateway.post(path, body)
            error = response.json()["error"]
            assert (response.status, bool(error["message"])) == (400, True)
            assert (response.json().get("type") == "error") == (path == MESSAGES)
            assert (error.get("status") == "INVALID_ARGUMENT") == (path == GEMINI)
    assert gateway.engine.received == []
    assert await gateway.store.list_rollouts() == []


@pytest.mark.parametrize(
    "body",
    [
        b'{"choices":[]}',
        b'{"choices":null}',
        b'{"choices":[null]}',
        b'{"choices":[{"message":null}]}',
        b"{}",
        b"no json",
    ],
)
async def test_a_response_without_an_answer_is_a_502_in_the_envelope_and_not_an_empty_answer(
    gateway: Gateway, body: bytes
) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type="application/json")

    gateway.engine.handler = answer
    kinds = ("api_error", "server_error", "INTERNAL")
    for number, ((path, asked), kind) in enumerate(zip(calls(streamed=False), kinds, strict=True)):
        response = await gateway.post(path, asked, f"r{number}")
        error = response.json()["error"]
        assert (response.status, error.get("status", error.get("type"))) == (502, kind)
        assert "response" in error["message"] or "message to translate" in error["message"]
        assert len(await gateway.flags(f"r{number}")) == 1


async def test_a_gemini_path_without_a_model_is_refused_and_one_with_a_colon_is_read(gateway: Gateway) -> None:
    answer_with(gateway, "01-chat")
    response = await gateway.post("/v1beta/models/:generateContent", contents())
    assert (response.status, response.json()["error"]["status"]) == (400, "INVALID_ARGUMENT")
    assert gateway.engine.received == []
    assert (await gateway.post("/v1beta/models/qwen3:8b:generateContent", contents())).status == 200
    assert (await gateway.store.read_entries("r1"))[0].translation.client_model == "qwen3:8b"  # type: ignore[union-attr]


async def test_a_key_of_the_query_that_no_header_can_carry_is_left_out(gateway: Gateway) -> None:
    answer_with(gateway, "01-chat")
    for key, carried in (("%00", []), ("a%0d%0aX-More:%20b", []), ("", []), ("a-key", ["Bearer a-key"])):
        assert (await gateway.post(f"{GEMINI}?key={key}", contents())).status == 200
        sent = gateway.engine.received[-1].headers
        assert [value for name, value in sent if name.lower() == "authorization"] == carried
    assert await gateway.flags("r1") == []
