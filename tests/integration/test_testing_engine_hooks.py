"""Hooks of the testing engine: hold, fail and break calls."""

from __future__ import annotations

import asyncio
import json
import urllib.request

import aiohttp
import pytest
import uvicorn

from support.engine_client import HELLO, Client
from token_id_capture.testing.engine import BrokenResponse, EngineCall, Failure, PolicyEngine
from token_id_capture.testing.serving import engine_in_thread, serve_engine


async def test_a_hook_sees_each_call_and_can_hold_it() -> None:
    arrived, release = asyncio.Event(), asyncio.Event()

    async def hold(call: EngineCall) -> None:
        arrived.set()
        await release.wait()

    engine = PolicyEngine(on_call=hold)
    async with serve_engine(engine) as url, aiohttp.ClientSession() as session:
        waiting = asyncio.create_task(Client(url, session).chat(HELLO))
        await asyncio.wait_for(arrived.wait(), 60)
        assert [(call.number, call.path, call.body["seed"]) for call in engine.calls] == [
            (1, "/v1/chat/completions", 1)
        ]
        assert not waiting.done()
        release.set()
        assert (await asyncio.wait_for(waiting, 60))["choices"]


async def test_a_hook_can_make_a_call_fail() -> None:
    async def fail(call: EngineCall) -> Failure | None:
        return Failure(503, "no room") if call.number == 1 else None

    async with serve_engine(PolicyEngine(on_call=fail)) as url, aiohttp.ClientSession() as session:
        status, body = await Client(url, session).post("/v1/chat/completions", HELLO)
        assert (status, body["error"]["message"]) == (503, "no room")
        assert (await Client(url, session).chat(HELLO))["choices"]


@pytest.mark.parametrize("frames", [0, 1, 4])
async def test_a_hook_can_break_a_stream(frames: int) -> None:
    async def cut(call: EngineCall) -> BrokenResponse:
        return BrokenResponse(after_frames=frames)

    async with (
        serve_engine(PolicyEngine(on_call=cut)) as url,
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/chat/completions", json={**HELLO, "stream": True}) as response,
    ):
        for _ in range(frames):
            assert (await response.content.readline()).startswith(b"data: ")
            assert await response.content.readline() == b"\n"
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.content.readline()


async def test_a_hook_can_break_a_whole_response() -> None:
    async def cut(call: EngineCall) -> BrokenResponse:
        return BrokenResponse()

    async with (
        serve_engine(PolicyEngine(on_call=cut)) as url,
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/chat/completions", json=HELLO) as response,
    ):
        assert response.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()


async def test_a_client_that_hangs_up_ends_the_call() -> None:
    arrived, given_up = asyncio.Event(), asyncio.Event()

    async def hold(call: EngineCall) -> None:
        arrived.set()
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()

    async with serve_engine(PolicyEngine(on_call=hold)) as url, aiohttp.ClientSession() as session:
        waiting = asyncio.create_task(Client(url, session).chat(HELLO))
        await asyncio.wait_for(arrived.wait(), 60)
        waiting.cancel()
        await asyncio.wait_for(given_up.wait(), 60)


async def test_a_held_call_does_not_keep_the_engine_from_stopping() -> None:
    arrived = asyncio.Event()

    async def hold(call: EngineCall) -> None:
        arrived.set()
        await asyncio.Event().wait()

    async with aiohttp.ClientSession() as session:
        async with asyncio.timeout(60), serve_engine(PolicyEngine(on_call=hold)) as url:
            waiting = asyncio.create_task(Client(url, session).chat(HELLO))
            await arrived.wait()
        with pytest.raises((aiohttp.ClientError, AssertionError)):
            await waiting


async def test_tokens_can_take_their_time() -> None:
    async with serve_engine(PolicyEngine(seconds_per_token=0.01)) as url, aiohttp.ClientSession() as session:
        loop = asyncio.get_running_loop()
        started = loop.time()
        response = await Client(url, session).chat({**HELLO, "max_tokens": 10, "seed": 1})
        assert loop.time() - started >= 0.01 * response["usage"]["completion_tokens"]


def test_an_engine_in_a_thread_serves_a_program_without_an_event_loop() -> None:
    engine = PolicyEngine()
    with engine_in_thread(engine) as url:
        request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(HELLO).encode())
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.load(response)["model"] == "policy"
    assert len(engine.calls) == 1
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{url}/health", timeout=1)


def test_an_engine_that_cannot_start_says_why_instead_of_letting_its_clients_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(config: uvicorn.Config) -> None:
        raise ImportError("no HTTP here")

    monkeypatch.setattr(uvicorn.Config, "load", fails)
    with pytest.raises(ImportError, match="no HTTP here"), engine_in_thread():
        pass
