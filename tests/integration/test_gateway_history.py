"""The history of a client, put back as the policy wrote it: what harnesses rewrite does not make another prompt."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from support.replay import Gateway, Recording, running_gateway
from token_id_capture.server.dialects.seal import seal

ORIGINAL = '{ "unit":"c",  "city": "caf\\u00e9", "days": 10000.0 }'
REBUILT = {"city": "café", "days": 10000, "unit": "c"}
COMPACT = orjson.dumps(REBUILT).decode()
TEXT, THOUGHT = "Let me look.  \n\n", "It is about the weather.\n"
USER = {"role": "user", "content": "hi"}
TOOL = {"name": "weather", "input_schema": {"type": "object"}}


def generated() -> bytes:
    """A recorded response, in which the policy says something that harnesses rewrite."""
    response = orjson.loads(Recording.named("12c-tools-auto-text-and-call").payload)
    message = response["choices"][0]["message"]
    message.update(content=TEXT, reasoning=THOUGHT)
    message["tool_calls"][0].update(id="call-1", function={"name": "weather", "arguments": ORIGINAL})
    return orjson.dumps(response)


async def answer(request: web.Request) -> web.StreamResponse:
    return web.Response(body=generated(), content_type="application/json")


def messages(*turns: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 9, "messages": [USER, *turns], "tools": [TOOL]}


def echoed(*blocks: dict[str, Any]) -> dict[str, Any]:
    """What Claude Code makes of the response: arguments rebuilt, and the text as a harness may strip it."""
    call = {"type": "tool_use", "id": "call-1", "name": "weather", "input": REBUILT}
    said = [{"type": "text", "text": TEXT.strip()}, call]
    result = {"type": "tool_result", "tool_use_id": "call-1", "content": "rain"}
    return messages({"role": "assistant", "content": [*blocks, *said]}, {"role": "user", "content": [result]})


def sent(gateway: Gateway) -> dict[str, Any]:
    """The assistant message that the engine got."""
    message: dict[str, Any] = gateway.engine.received[-1].json()["messages"][1]
    return message


def arguments_of(message: dict[str, Any]) -> str:
    arguments: str = message["tool_calls"][0]["function"]["arguments"]
    return arguments


@pytest.mark.parametrize(("history", "reasoning"), [("exact", None), ("full", THOUGHT)])
async def test_what_a_client_rewrote_is_undone_and_under_full_what_it_dropped_too(
    tmp_path: Path, history: str, reasoning: str | None
) -> None:
    async with running_gateway(tmp_path, history=history) as gateway:
        gateway.engine.handler = answer
        await gateway.post("/v1/messages", messages())
        await gateway.post("/v1/messages", echoed())
        message = sent(gateway)
        assert (message["content"], arguments_of(message)) == (TEXT, ORIGINAL)
        assert message.get("reasoning_content") == reasoning
        translation = (await gateway.store.read_entries("r1"))[-1].translation
        assert translation is not None
        assert (translation.history, translation.restored) == (history, 1)


async def test_a_client_that_sends_the_seal_back_keeps_its_reasoning_in_each_dialect(tmp_path: Path) -> None:
    call_id = "call-1"
    thought = seal(THOUGHT)
    responses = {
        "model": "m",
        "input": [
            USER,
            {"type": "reasoning", "summary": [], "encrypted_content": thought},
            {"role": "assistant", "content": [{"type": "output_text", "text": TEXT}]},
            {
                "type": "function_call",
                "call_id": call_id,
                "name": "weather",
                "arguments": orjson.dumps(REBUILT).decode(),
            },
            {"type": "function_call_output", "call_id": call_id, "output": "rain"},
        ],
    }
    gemini = {
        "contents": [
            {"role": "user", "parts": [{"text": "hi"}]},
            {
                "role": "model",
                "parts": [
                    {"text": TEXT},
                    {
                        "functionCall": {"id": call_id, "name": "weather", "args": REBUILT},
                        "thoughtSignature": thought,
                    },
                ],
            },
            {
                "role": "user",
                "parts": [{"functionResponse": {"id": call_id, "name": "weather", "response": {"output": "r"}}}],
            },
        ]
    }
    claude = echoed({"type": "thinking", "thinking": "shortened", "signature": thought})
    async with running_gateway(tmp_path) as gateway:
        gateway.engine.handler = answer
        await gateway.post("/v1/messages", messages())
        for path, body in (
            ("/v1/messages", claude),
            ("/v1/responses", responses),
            ("/v1beta/models/m:generateContent", gemini),
        ):
            assert (await gateway.post(path, body)).status == 200
            message = sent(gateway)
            assert (message["content"], arguments_of(message)) == (TEXT, ORIGINAL)
            assert message["reasoning_content"] == THOUGHT


async def test_another_process_puts_back_what_this_one_captured(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as first:
        first.engine.handler = answer
        await first.post("/v1/messages", messages())
    async with running_gateway(tmp_path) as second:
        second.engine.handler = answer
        await second.post("/v1/messages", echoed())
        assert arguments_of(sent(second)) == ORIGINAL


@pytest.mark.parametrize("change", ["value", "text", "name", "id", "rollout", "off"])
async def test_a_message_that_says_something_else_is_left_as_it_is(tmp_path: Path, change: str) -> None:
    body = copy.deepcopy(echoed())
    text, call = body["messages"][1]["content"]
    if change == "value":
        call["input"]["days"] = 10001
    elif change == "text":
        text["text"] = "Let me look again."
    elif change == "name":
        call["name"] = "forecast"
    elif change == "id":
        call["id"] = body["messages"][2]["content"][0]["tool_use_id"] = "call-2"
    async with running_gateway(tmp_path, history="off" if change == "off" else "exact") as gateway:
        gateway.engine.handler = answer
        await gateway.post("/v1/messages", messages())
        await gateway.post("/v1/messages", body, "another" if change == "rollout" else "r1")
        assert arguments_of(sent(gateway)) != ORIGINAL


async def test_a_native_chat_keeps_its_bytes_unless_the_setting_says_otherwise(tmp_path: Path) -> None:
    call = {
        "id": "call-1",
        "type": "function",
        "function": {"name": "weather", "arguments": COMPACT},
    }
    turn = {"role": "assistant", "content": TEXT, "tool_calls": [call]}
    chat = {"model": "m", "messages": [USER, turn, {"role": "tool", "tool_call_id": "call-1", "content": "rain"}]}
    for setting, expected in (("off", call["function"]["arguments"]), ("exact", ORIGINAL)):  # type: ignore[index]
        async with running_gateway(tmp_path / setting, chat_history=setting) as gateway:
            gateway.engine.handler = answer
            await gateway.post("/v1/chat/completions", {"model": "m", "messages": [USER]})
            await gateway.post("/v1/chat/completions", chat)
            assert arguments_of(sent(gateway)) == expected
            first = await gateway.post("/v1/chat/completions", b"{", "malformed")
            assert first.status == 200
            assert gateway.engine.received[-1].body == b"{"
