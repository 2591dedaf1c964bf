"""Each engine that is understood, behind each dialect: stored is what the same generation stores over chat."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from support.replay import Gateway, running_gateway
from support.spoken import Spoken
from support.ways import CHAT, WAYS, Way
from token_id_capture.records import TokenEntry
from token_id_capture.testing.replay import Recording

LLAMA = Path(__file__).parents[1] / "data" / "recordings" / "llama-server-b1-0c1e570"
CHATS = [name for name, way in WAYS.items() if way.path == CHAT]


def requests(streamed: bool) -> list[tuple[str, dict[str, Any]]]:
    """The path and body of a request in each dialect."""
    user = {"role": "user", "content": "hi"}
    verb = "streamGenerateContent?alt=sse" if streamed else "generateContent"
    return [
        ("/v1/messages", {"model": "tiny", "max_tokens": 9, "messages": [user], "stream": streamed}),
        ("/v1/responses", {"model": "tiny", "input": [user], "stream": streamed}),
        (f"/v1beta/models/tiny:{verb}", {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}),
    ]


def stored(entry: TokenEntry) -> tuple[Any, ...]:
    return (
        entry.prompt_token_ids,
        entry.generation_token_ids,
        entry.generation_log_probs,
        entry.output_items,
        entry.finish_reason,
        entry.response_id,
        entry.model,
    )


def answer_with(gateway: Gateway, chat: Recording, others: dict[str, Recording]) -> None:
    async def answer(request: web.Request) -> web.Response:
        recording = others.get(request.path, chat)
        return web.Response(
            body=recording.payload, status=recording.status, headers={"content-type": recording.content_type}
        )

    gateway.engine.handler = answer


def gateway_of(way: Way, database: Path) -> Any:
    settings = {name: getattr(way.options, name) for name in ("streaming", "tokenize_prompts")}
    return running_gateway(database, engine=way.engine, **settings)


@pytest.mark.parametrize("name", CHATS)
async def test_each_dialect_stores_what_chat_stores(tmp_path: Path, name: str) -> None:
    way = WAYS[name]
    streamed = bool(way.request.get("stream"))
    async with gateway_of(way, tmp_path) as gateway:
        answer_with(gateway, way.recording(Spoken()), way.answers)
        await gateway.post(CHAT, way.request, "chat")
        expected = stored(await gateway.entry("chat"))
        for number, (path, body) in enumerate(requests(streamed)):
            response = await gateway.post(path, body, f"r{number}")
            assert (response.status, response.whole) == (200, True), response.body
            assert b"Hel" in response.body
            assert stored(await gateway.entry(f"r{number}")) == expected
            assert await gateway.flags(f"r{number}") == []


@pytest.mark.parametrize("streamed", [False, True])
async def test_recorded_tool_calls_and_thoughts_of_llama_server_reach_each_dialect(
    tmp_path: Path, streamed: bool
) -> None:
    tokenizer = {
        path: Recording.load(LLAMA, f"22{path.replace('/', '-')}") for path in ("/apply-template", "/tokenize")
    }
    async with running_gateway(tmp_path, engine="llama-cpp", tokenize_prompts=True) as gateway:
        for name in ("12-tools-call", "14-think", "11-chat-length"):
            recording = Recording.load(LLAMA, name)
            response = orjson.loads(recording.payload)
            message = response["choices"][0]["message"]
            tokens = orjson.dumps({"tokens": list(range(response["usage"]["prompt_tokens"]))})
            tokenizer["/tokenize"] = replace(tokenizer["/tokenize"], payload=tokens)
            answer_with(gateway, recording, tokenizer)
            await gateway.post(CHAT, {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}, name)
            expected = stored(await gateway.entry(name))
            for number, (path, body) in enumerate(requests(streamed)):
                seen = await gateway.post(path, body, f"{name}-{number}")
                assert (seen.status, seen.whole) == (200, True)
                assert stored(await gateway.entry(f"{name}-{number}")) == expected
                for call in message.get("tool_calls") or ():
                    assert call["id"].encode() in seen.body


async def test_a_recorded_error_of_llama_server_starts_compaction(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, engine="llama-cpp") as gateway:
        answer_with(gateway, Recording.load(LLAMA, "18-error-too-long"), {})
        (messages, responses, _) = requests(streamed=True)
        response = await gateway.post(*messages)
        assert response.json()["error"]["message"].startswith("prompt is too long: ")
        response = await gateway.post(*responses)
        assert (response.status, response.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert await gateway.intents() == ["refused"] * 2
