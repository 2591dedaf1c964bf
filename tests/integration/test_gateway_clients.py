"""The clients that people use, against the gateway: each endpoint, streamed and not, and the engine's errors."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
from aiohttp import web

from support.made_up import answering
from support.replay import Gateway, running_gateway
from support.spoken import Spoken
from support.ways import CHAT, COMPLETIONS, WAYS
from token_id_capture.testing.replay import Recording

LLAMA = Path(__file__).parents[1] / "data" / "recordings" / "llama-server-b1-0c1e570"
VLLM = LLAMA.parent / "vllm-0.32.0"
ERROR = {"error": {"message": "This is too long.", "type": "BadRequestError", "param": "messages", "code": 400}}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path, engine="vllm") as running:
        running.engine.handler = speaking
        yield running


async def speaking(request: web.Request) -> web.StreamResponse:
    """vLLM in few words: every generation endpoint, as a stream if that is asked for."""
    body = await request.json()
    names = {CHAT: "vllm-chat", COMPLETIONS: "vllm-completion", "/inference/v1/generate": "vllm-generate"}
    way = WAYS[names[request.path] + ("-stream" if body.get("stream") else "")]
    recording = way.recording(Spoken())
    return web.Response(body=recording.payload, headers={"content-type": recording.content_type})


def recorded(folder: Path, **paths: str) -> Callable[[web.Request], Any]:
    """An engine that answers each path with one recording of the folder."""
    responses = {
        path: Recording.load(folder, name)
        for path, name in {path.replace("_", "/"): name for path, name in paths.items()}.items()
    }

    async def handler(request: web.Request) -> web.Response:
        recording = responses[request.path.rpartition("/")[2]]
        return web.Response(body=recording.payload, status=recording.status, content_type="application/json")

    return handler


def official(gateway: Gateway, rollout: str = "r1") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=gateway.base(rollout) + "/v1", api_key="none", max_retries=0)


HI: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


async def test_a_stream_made_from_a_whole_response_with_a_tool_call_is_what_the_official_client_expects(
    tmp_path: Path,
) -> None:
    async with (
        running_gateway(tmp_path, engine="llama-cpp", tokenize_prompts=True) as gateway,
        official(gateway) as client,
    ):
        names = {"completions": "12-tools-call", "apply-template": "22b-tools-apply-template"}
        gateway.engine.handler = recorded(LLAMA, **names, tokenize="22b-tools-tokenize")
        weather: Any = [{"role": "user", "content": "How is the weather in Oslo?"}]
        stream = await client.chat.completions.create(
            model="tiny", messages=weather, tools=TOOLS, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert gateway.engine.received[0].json()["stream"] is False
        (call,) = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or ()]
        assert call.function is not None
        assert (call.index, call.function.name, call.function.arguments) == (0, "get_weather", '{"city": "Malmö"}')
        assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "tool_calls"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 22
        assert chunks[0].choices[0].delta.role == "assistant"
        assert not any(choice.logprobs for chunk in chunks for choice in chunk.choices)
        entry = await gateway.entry()
        assert (len(entry.prompt_token_ids), len(entry.generation_token_ids)) == (127, 22)
        assert entry.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "name", ["06-chat-n2", "12c-tools-auto-text-and-call", "14h-reasoning-and-tool", "14-reasoning", "04-completion"]
)
async def test_a_stream_made_from_a_whole_response_says_what_the_response_said(tmp_path: Path, name: str) -> None:
    response = orjson.loads(Recording.load(VLLM, name).payload)
    chat = "completion" not in name
    async with running_gateway(tmp_path, engine="vllm", streaming="never") as gateway, official(gateway) as client:
        gateway.engine.handler = recorded(VLLM, completions=name)
        asked: Any = {"model": "tiny", "stream": True, "logprobs": True if chat else 1}
        said: dict[int, dict[str, Any]] = {}
        if not chat:
            async for text in await client.completions.create(prompt="hi", **asked):
                for choice in text.choices:
                    said.setdefault(0, {"text": ""})["text"] += choice.text
            assert said[0]["text"] == response["choices"][0]["text"]
            return
        async with client.chat.completions.stream(
            **{key: value for key, value in asked.items() if key != "stream"}, messages=HI, n=len(response["choices"])
        ) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        for choice, whole in zip(final.choices, response["choices"], strict=True):
            message = choice.message.model_dump()
            assert (message["content"] or None) == (whole["message"]["content"] or None)
            assert message.get("reasoning") == whole["message"].get("reasoning")
            calls = [call["function"] for call in whole["message"].get("tool_calls", ())]
            got = [call["function"] for call in message["tool_calls"] or ()]
            assert [(call["name"], call["arguments"]) for call in got] == [
                (call["name"], call["arguments"]) for call in calls
            ]
            assert choice.finish_reason == whole["finish_reason"]
            assert choice.logprobs is not None
            assert choice.logprobs.content is not None
            assert [entry.logprob for entry in choice.logprobs.content] == [
                entry["logprob"] for entry in whole["logprobs"]["content"]
            ]
        assert len(await gateway.store.read_entries("r1")) == len(response["choices"])


async def test_the_official_client_raises_the_engines_errors(gateway: Gateway) -> None:
    async with official(gateway) as client:
        calls: tuple[Callable[[], Awaitable[object]], ...] = (
            lambda: client.chat.completions.create(model="tiny", messages=HI),
            lambda: client.chat.completions.create(model="tiny", messages=HI, stream=True),
            lambda: client.completions.create(model="tiny", prompt="hi"),
        )
        for status, error in ((400, openai.BadRequestError), (404, openai.NotFoundError), (500, openai.APIStatusError)):
            gateway.engine.handler = answering(ERROR, status)
            for call in calls:
                with pytest.raises(error) as raised:
                    await call()
                assert raised.value.status_code == status
                assert "This is too long." in str(raised.value)


async def test_an_error_of_a_call_whose_stream_would_be_made_reaches_the_client_as_it_is(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, engine="sglang") as gateway, official(gateway) as client:
        gateway.engine.handler = answering(ERROR, 400)
        with pytest.raises(openai.BadRequestError, match="This is too long"):
            await client.chat.completions.create(model="tiny", messages=HI, stream=True)
        assert await gateway.intents() == ["refused"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize("stream", [False, True])
async def test_plain_curl_works_on_each_endpoint(gateway: Gateway, stream: bool) -> None:
    asked = {
        CHAT: {"model": "tiny", "messages": HI},
        COMPLETIONS: {"model": "tiny", "prompt": "hi"},
        "/inference/v1/generate": {"token_ids": [1, 2, 3], "sampling_params": {}},
    }
    for number, (path, body) in enumerate(asked.items()):
        rollout = f"r{number}"
        status, said = await curl(gateway.base(rollout) + path, {**body, "stream": stream})
        assert status == 200
        assert said.endswith(b"data: [DONE]\n\n") == stream
        assert (b"Hel" in said) == (path != "/inference/v1/generate")
        assert len(await gateway.store.read_entries(rollout)) == 1
    gateway.engine.handler = answering(ERROR, 400)
    assert await curl(gateway.base() + CHAT, {**asked[CHAT], "stream": stream}) == (400, orjson.dumps(ERROR))


async def curl(url: str, body: Any) -> tuple[int, bytes]:
    process = await asyncio.create_subprocess_exec(
        *("curl", "-sS", "-N", "-w", "\n%{http_code}", "-H", "Content-Type: application/json"),
        *("-d", orjson.dumps(body), url),
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(30):
        said, _ = await process.communicate()
    shown, _, status = said.rpartition(b"\n")
    return int(status), shown


LITELLM = """
import sys
import litellm

base = {"api_base": sys.argv[1], "api_key": "none", "max_retries": 0}
chat = {**base, "model": "openai/tiny", "messages": [{"role": "user", "content": "hi"}]}
text = {**base, "model": "text-completion-openai/tiny", "prompt": "hi"}
if sys.argv[2] == "errors":
    for call, asked in ((litellm.completion, chat), (litellm.text_completion, text)):
        try:
            call(**asked)
        except litellm.BadRequestError as error:
            assert "This is too long." in str(error), error
        else:
            raise AssertionError("no error")
else:
    print(litellm.completion(**chat).choices[0].message.content)
    print("".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**chat, stream=True)))
    print(litellm.text_completion(**text).choices[0].text)
    print("".join(chunk.choices[0].text or "" for chunk in litellm.text_completion(**text, stream=True)))
"""


@pytest.mark.skipif(importlib.util.find_spec("litellm") is None, reason="pip install litellm, which is large")
async def test_litellms_client_works_on_each_endpoint(gateway: Gateway) -> None:
    async def run(what: str) -> list[str]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", LITELLM, gateway.base() + "/v1", what),
            env={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "PATH": "/usr/bin:/bin"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(120):
            said, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        return said.decode().split()

    assert await run("calls") == ["Hello"] * 4
    assert len(await gateway.store.read_entries("r1")) == 4
    gateway.engine.handler = answering(ERROR, 400)
    await run("errors")
    assert await gateway.intents() == ["refused"] * 2
