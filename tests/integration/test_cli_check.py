"""``tokcap check``, and the check with which ``tokcap serve`` starts, against engines of every kind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from aiohttp import web

from support.commands import RunTokcap
from support.made_up import CHAT, answering, chat
from support.replay import ReplayEngine, replay_engine
from support.served import refused, serving
from support.spoken import Spoken
from support.ways import COMPLETIONS, WAYS
from token_id_capture.testing.engine import PolicyEngine
from token_id_capture.testing.serving import serve_engine

SPOKEN = Spoken(ids=[10, 11, 12])
NO_IDS = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]}


@pytest.fixture
async def engine() -> AsyncIterator[ReplayEngine]:
    async with replay_engine() as running:
        yield running


def speaking(
    spoken: Spoken = SPOKEN, *, chats: str, streams: str, texts: str, text_streams: str, **pages: Any
) -> Callable[..., Any]:
    """An engine that answers each mode in one of ``WAYS`` ("" refuses it), and these pages by their names."""

    async def handler(request: web.Request) -> web.StreamResponse:
        page = pages.get(request.path.rpartition("/")[2].replace("-", "_"))
        if page is not None:
            return web.json_response(page)
        if request.path not in (CHAT, COMPLETIONS):
            return web.json_response({"detail": "Not Found"}, status=404)
        streamed = (await request.json()).get("stream")
        pick = {CHAT: (chats, streams), COMPLETIONS: (texts, text_streams)}[request.path][bool(streamed)]
        if not pick:
            return web.json_response({"error": {"message": "cannot do that"}}, status=400)
        recording = WAYS[pick].recording(spoken)
        return web.Response(body=recording.payload, headers={"content-type": recording.content_type})

    return handler


def models(owner: str) -> Any:
    return {"data": [{"id": "tiny", "owned_by": owner}]}


async def checked(tokcap: RunTokcap, engine: ReplayEngine, *options: object) -> CompletedProcess[str]:
    return await asyncio.to_thread(tokcap, "check", "-u", engine.url, *options)


def outcomes(done: CompletedProcess[str]) -> list[str]:
    return [mode["outcome"] for mode in json.loads(done.stdout)["modes"]]


async def test_an_engine_that_sends_everything_is_found_and_found_good(tokcap: RunTokcap) -> None:
    policy = PolicyEngine()
    async with serve_engine(policy) as url:
        done = await asyncio.to_thread(tokcap, "check", "-u", url)
        assert done.returncode == 0, done.stdout
        head, table, *rows, continuity = done.stdout.splitlines()
        assert continuity == "--continuity: template and exact"
        assert head == f"{url}: vllm 0.32.0, model policy (says /version)"
        assert table.split("  ")[0] == "mode"
        assert [row.split("  ")[0] for row in rows] == [
            "chat",
            "chat, streamed",
            "chat with tools, streamed",
            "completion",
            "completion, streamed",
            "Messages, streamed",
            "Responses, streamed",
            "Gemini, streamed",
        ]
        assert all("exact" in row for row in rows)
        # Ten calls of a few tokens each: that is what it costs.
        assert len(policy.calls) == 10
        assert max(call.body["max_tokens"] for call in policy.calls) == 16


async def test_llama_server_wants_its_tokenizer_to_be_asked(tokcap: RunTokcap, engine: ReplayEngine) -> None:
    engine.handler = speaking(
        chats="llama-chat",
        streams="",
        texts="llama-completion",
        text_streams="llama-completion-stream",
        models=models("llamacpp"),
        props={"default_generation_settings": {}, "build_info": "b9-abc"},
        apply_template={"prompt": "rendered"},
        tokenize={"tokens": SPOKEN.prompt},
    )
    done = await checked(tokcap, engine)
    assert done.returncode == 2
    assert done.stdout.startswith(f"{engine.url}: llama-cpp b9-abc, model tiny (says /v1/models)\n")
    assert "--tokenize-prompts" in done.stdout
    done = await checked(tokcap, engine, "--tokenize-prompts", "--json")
    assert (done.returncode, outcomes(done)) == (0, ["captured"] * 8)
    assert (json.loads(done.stdout)["engine"], json.loads(done.stdout)["model"]) == ("llama-cpp", "tiny")


async def test_log_probabilities_that_are_all_zero_are_captured_and_doubted(
    tokcap: RunTokcap, engine: ReplayEngine
) -> None:
    spoken = Spoken(ids=SPOKEN.ids, log_probs=[0.0] * len(SPOKEN.ids))
    engine.handler = speaking(
        spoken,
        chats="vllm-chat",
        streams="vllm-chat-stream",
        texts="vllm-completion",
        text_streams="vllm-completion-stream",
        models=models("vllm"),
    )
    done = await checked(tokcap, engine)
    assert done.returncode == 0, done.stdout
    assert "every log probability is exactly 0" in done.stdout


async def test_an_old_sglang_is_asked_for_whole_responses(tokcap: RunTokcap, engine: ReplayEngine) -> None:
    engine.handler = speaking(
        chats="sglang-old-chat",
        streams="",
        texts="sglang-completion",
        text_streams="sglang-completion-stream",
        models=models("openai"),
        get_server_info={"version": "0.5.2", "model_path": "/models/tiny"},
    )
    done = await checked(tokcap, engine, "--json")
    assert (done.returncode, outcomes(done)) == (0, ["captured"] * 8)
    assert (json.loads(done.stdout)["engine"], json.loads(done.stdout)["version"]) == ("sglang", "0.5.2")
    # A stream asked of it all the same is refused, and said to be.
    done = await checked(tokcap, engine, "--streaming", "always", "--json")
    assert outcomes(done) == ["captured", "refused", "refused", "captured", "captured", *["refused"] * 3]


async def test_streams_that_lose_ids_on_the_way_are_made_from_whole_responses(
    tokcap: RunTokcap, engine: ReplayEngine
) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response: web.StreamResponse = await complete(request)
        if isinstance(response, web.Response) and isinstance(response.body, bytes) and b"data:" in response.body[:5]:
            lost = response.body.replace(b"prompt_token_ids", b"lost")
            return web.Response(body=lost, headers={"content-type": "text/event-stream"})
        return response

    complete = speaking(
        chats="vllm-chat",
        streams="vllm-chat-stream",
        texts="vllm-completion",
        text_streams="vllm-completion-stream",
        models=models("openai"),
    )
    engine.handler = handler
    done = await checked(tokcap, engine)
    assert done.returncode == 0, done.stdout
    assert "an engine of unknown kind, model tiny" in done.stdout
    assert "they are made from whole responses (--streaming never)" in done.stdout
    done = await checked(tokcap, engine, "--streaming", "always")
    assert done.returncode == 1
    assert "a proxy in between drops them in streams: --streaming never" in done.stdout


async def redirecting(request: web.Request) -> web.Response:
    return web.Response(status=308, headers={"location": f"https://engine{request.path}"})


@pytest.mark.parametrize(
    ("handler", "options", "said"),
    [
        (answering(NO_IDS), [], "no prompt token ids, no token ids, no log probabilities"),
        (answering(NO_IDS), ["--engine", "message"], "try --engine auto"),
        (answering({"error": {"message": "Unauthorized"}}, 401), [], "--upstream-api-key-file"),
        (redirecting, [], "give the address that it redirects to as --upstream"),
        (answering({"error": {"message": "CUDA error"}}, 500), [], "failed (unknown_outcome: HTTP 500: CUDA error)"),
    ],
)
async def test_an_engine_that_cannot_be_captured_is_exit_code_2_with_what_to_change(
    tokcap: RunTokcap, engine: ReplayEngine, handler: Any, options: list[str], said: str
) -> None:
    engine.handler = handler
    done = await checked(tokcap, engine, *options)
    assert done.returncode == 2
    assert said in done.stdout
    assert done.stderr == ""


async def test_an_engine_that_does_not_answer_in_time_failed(tokcap: RunTokcap, engine: ReplayEngine) -> None:
    async def handler(request: web.Request) -> web.Response:
        if request.method == "POST":
            await released.wait()
        return web.json_response({}, status=404)

    released = asyncio.Event()
    engine.handler = handler
    done = await checked(tokcap, engine, "--timeout", "0.1", "--json")
    released.set()
    assert (done.returncode, set(outcomes(done))) == (2, {"failed"})


def test_nobody_there_is_one_line(tokcap: RunTokcap) -> None:
    done = tokcap("check", "-u", "http://127.0.0.1:9")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tokcap: nothing answers at http://127.0.0.1:9 (")
    for arguments in (("-u", "engine"), ("-u", "http://127.0.0.1:9", "--engine", "ollama")):
        assert tokcap("check", *arguments).returncode == 2


async def test_serve_refuses_an_engine_that_cannot_be_captured_unless_told_not_to_check(
    tokcap: RunTokcap, tmp_path: Path, engine: ReplayEngine
) -> None:
    engine.handler = answering(NO_IDS)
    said = await refused(tokcap, "-u", engine.url, "-d", str(tmp_path / "captures.db"), "--port", "0")
    assert said.startswith(f"calls to {engine.url} cannot be captured: chat / chat, streamed / ")
    assert "no_token_ids" in said
    assert said.endswith("(--no-check starts anyway)")
    async with serving(tmp_path / "captures.db", engine.url, "--no-check") as server:
        assert (await server.post(server.base() + CHAT))[0] == 200


async def test_serve_asks_the_engine_as_the_check_found_that_it_must_be_asked(
    tmp_path: Path, engine: ReplayEngine
) -> None:
    engine.handler = speaking(
        chats="sglang-chat",
        streams="",
        texts="sglang-completion",
        text_streams="sglang-completion-stream",
        models=models("sglang"),
        server_info={"version": "0.5.23", "model_path": "/models/tiny"},
    )
    async with serving(tmp_path / "captures.db", engine.url, "--check") as server:
        asked = len(engine.received)
        status, body = await server.post(server.base() + CHAT, {"model": "tiny", "messages": [], "stream": True})
        assert (status, body[-14:]) == (200, b"data: [DONE]\n\n")
        assert engine.received[asked].json()["return_meta_info"] is True


async def test_serve_says_what_is_not_captured_and_starts(tmp_path: Path, engine: ReplayEngine) -> None:
    engine.handler = answering(chat([5, 6], [-0.1, -0.2]))
    async with serving(tmp_path / "captures.db", engine.url, "--check") as server:
        assert (await server.post(server.base() + CHAT))[0] == 200


async def test_a_adapter_of_ones_own_is_named_from_where_it_lies(
    tmp_path: Path, engine: ReplayEngine, tokcap: RunTokcap, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_engine.py").write_text(
        "from token_id_capture.server.engines.vllm import VllmEngine\n\n\nclass MyEngine(VllmEngine):\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    engine.handler = answering(chat([5, 6], [-0.1, -0.2]))
    done = await checked(tokcap, engine, "--engine", "my_engine:MyEngine", "--json")
    assert outcomes(done)[0] == "captured"
    assert json.loads(done.stdout)["engine"] == "my_engine:MyEngine"
    async with serving(tmp_path / "captures.db", engine.url, "--engine", "my_engine:MyEngine", "--workers", "2") as one:
        assert (await one.post(one.base() + CHAT))[0] == 200
    done = await checked(tokcap, engine, "--engine", "my_engine:Nobody")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tokcap: engine 'my_engine:Nobody' could not be loaded: AttributeError")


async def test_an_engine_that_ignores_prompts_as_ids_is_told_and_serve_with_continuity_refuses_it(
    tokcap: RunTokcap, tmp_path: Path
) -> None:
    async with serve_engine(PolicyEngine(takes_prompt_ids=False)) as url:
        done = await asyncio.to_thread(tokcap, "check", "-u", url)
        assert done.returncode == 0
        told = done.stdout.splitlines()[-1]
        assert told.startswith("--continuity: not with this engine; it ignored the token ids of a prompt")
        said = await refused(tokcap, "-u", url, "-d", str(tmp_path / "captures.db"), "--port", "0", "--continuity")
        assert said.startswith(f"--continuity exact does not work with {url}: not with this engine")
        named = ("-u", url, "-d", str(tmp_path / "captures.db"), "--engine", "llama-cpp", "--no-check", "--port", "0")
        said = await refused(tokcap, *named, "--continuity", "template")
        assert "engine 'llama-cpp' takes no prompt as token ids" in said
