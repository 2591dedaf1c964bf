"""How much memory the server takes: idle, with many streams at once, and for a very long response."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from support.made_up import CHAT, STREAM, answering, chat, delta, events, usage
from support.replay import ReplayEngine, replay_engine, until
from support.served import Serving, serving

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MEGABYTE = 1024
STREAMS = 256


def kilobytes(pid: int, field: str = "VmRSS") -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1])


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def forget_peak(pid: int) -> None:
    """Set the high-water mark back to the present size."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


@pytest.fixture
async def engine() -> AsyncIterator[ReplayEngine]:
    async with replay_engine() as running:
        running.handler = answering(chat([5, 6], [-0.1, -0.2]))
        yield running


@pytest.fixture
async def server(tmp_path: Path, engine: ReplayEngine) -> AsyncIterator[Serving]:
    async with serving(tmp_path / "captures.db", engine.url, "--engine", "vllm") as running:
        await running.post(running.base("first") + CHAT)
        yield running


async def test_an_idle_worker_takes_less_than_90_megabytes(tmp_path: Path, engine: ReplayEngine) -> None:
    async with serving(tmp_path / "captures.db", engine.url, "--workers", "2") as server:

        async def workers() -> list[int]:
            """The processes that serve; another one belongs to the multiprocessing module, and is small."""
            pids = [pid for pid in children(server.process.pid) if kilobytes(pid) > 60 * MEGABYTE]
            return pids if len(pids) == 2 else []

        pids = await until(workers, 30)
        assert (await server.get("/readyz"))[0] == 200
        assert max(map(kilobytes, pids)) < 90 * MEGABYTE


async def test_each_of_256_streams_takes_less_than_half_a_megabyte(server: Serving, engine: ReplayEngine) -> None:
    go_on = asyncio.Event()
    begun = 0
    first = b"".join(events(delta([], prompt_token_ids=list(range(8_000))), *[delta([7])] * 100, done=False))
    last = b"".join(events(delta([8], "stop"), usage(101)))

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal begun
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(first)
        begun += 1
        await go_on.wait()
        await response.write(last)
        await response.write_eof()
        return response

    async def all_begun() -> bool:
        return begun == STREAMS

    engine.handler = handler
    before = kilobytes(server.process.pid)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        received = 0

        async def read(number: int) -> bytes:
            nonlocal received
            async with session.post(f"{server.url}{server.base(f's{number}')}{CHAT}", json=STREAM) as response:
                pieces = []
                async for piece in response.content.iter_any():
                    received += piece.count(b"data: ")
                    pieces.append(piece)
                return b"".join(pieces)

        streams = [asyncio.create_task(read(number)) for number in range(STREAMS)]
        await until(all_begun, 60)

        async def passed_on() -> bool:
            return received == first.count(b"data: ") * STREAMS

        await until(passed_on, 60)
        assert kilobytes(server.process.pid) - before < STREAMS * MEGABYTE / 2
        go_on.set()
        assert all(body.endswith(b"data: [DONE]\n\n") for body in await asyncio.gather(*streams))


async def test_a_response_of_40_megabytes_takes_less_than_five_times_its_size(
    server: Serving, engine: ReplayEngine
) -> None:
    tokens = 440_000
    entry = {"token": " the", "logprob": -0.1234567890123, "bytes": [32, 116, 104, 101], "top_logprobs": []}
    response: dict[str, Any] = chat([7] * tokens, None)
    response["choices"][0]["logprobs"] = {"content": [entry] * tokens}
    body = orjson.dumps(response)

    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    engine.handler = handler
    assert 39e6 < len(body) < 41e6
    pid = server.process.pid
    before = kilobytes(pid)
    forget_peak(pid)
    status, _ = await server.post(server.base("long") + CHAT)
    assert status == 200
    assert kilobytes(pid, "VmHWM") - before < 5 * len(body) / 1024
