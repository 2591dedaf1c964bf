"""Clients that hang up, a thousand times: afterwards nothing is left of them but what the store says."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import re
import sqlite3
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
import pytest

from support import served
from support.replay import serving, until
from token_id_capture.server.app import create_app
from token_id_capture.server.defaults import Streaming
from token_id_capture.server.http.upstream import Upstream
from token_id_capture.server.settings import GatewaySettings
from token_id_capture.store import TokenCaptureStore
from token_id_capture.testing.engine import BrokenResponse, EngineCall, Failure, PolicyEngine
from token_id_capture.testing.serving import serve_engine

AT_ONCE = 40
DRAIN_SECONDS = 0.1
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/inference")


class HangingUp:
    """A client that closes its connections at random points; ``seed`` makes it repeatable."""

    def __init__(self, url: str, seed: int) -> None:
        self._port = urlsplit(url).port
        self._random = random.Random(seed)
        self._room = asyncio.Semaphore(AT_ONCE)

    async def run(self, count: int) -> None:
        await asyncio.gather(*map(self._call, range(count)))

    async def _call(self, number: int) -> None:
        leave: Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
        leave = self._random.choice((in_the_request, before_the_first_byte, in_the_middle, before_the_end))
        request = self._request(number)
        brutal = self._random.random() < 0.5
        async with self._room:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            try:
                # A peer that broke the response was quicker; that is a hang-up too.
                with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                    await leave(request, reader, writer)
            finally:
                if brutal:
                    writer.transport.abort()
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()

    def _request(self, number: int) -> bytes:
        path = self._random.choices(PATHS, (6, 2, 1, 1))[0]
        prefix = f"/ng-rollout/r{number}/training-token-capture" if self._random.random() < 0.8 else ""
        body: dict[str, Any] = {
            "model": "policy",
            "messages": [{"role": "user", "content": "hi"}],
            "prompt": "hi",
            "seed": number,
            "stream": self._random.random() < 0.7,
            # Some take longer than the gateway waits for the end of a call whose client left.
            "max_tokens": self._random.choice((4, 20, 400)),
            "ignore_eos": True,
        }
        raw = orjson.dumps(body) if path != "/v1/models" else b""
        method = "POST" if raw else "GET"
        head = f"{method} {prefix}{path} HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\n"
        head += f"Content-Length: {len(raw)}\r\n\r\n"
        return head.encode() + raw


async def in_the_request(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(request[: len(request) * 2 // 3])
    await writer.drain()


async def before_the_first_byte(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(request)
    await writer.drain()
    await asyncio.sleep(0.002 * (len(request) % 5))


async def in_the_middle(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(request)
    await reader.readexactly(10 + 97 * (len(request) % 11))


async def before_the_end(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As clients do that have seen the last event: they don't wait for the end of the body."""
    writer.write(request)
    streamed = b"text/event-stream" in await reader.readuntil(b"\r\n\r\n")
    await reader.readuntil(b"[DONE]" if streamed else b"{")


async def fail_sometimes(call: EngineCall) -> Failure | BrokenResponse | None:
    if call.number % 29 == 0:
        return Failure()
    return BrokenResponse(2) if call.number % 31 == 0 else None


def open_files(process: int | str = "self") -> Counter[str]:
    """What a process has open, by kind."""
    directory = f"/proc/{process}/fd"
    names: Counter[str] = Counter()
    for number in os.listdir(directory):
        with contextlib.suppress(OSError):
            names[re.sub(r"\d+", "N", os.readlink(f"{directory}/{number}"))] += 1
    return names


async def at_rest(process: int | str = "self") -> Counter[str]:
    """What is open once nothing has changed for half a second."""
    files = open_files(process)
    unchanged = 0
    while unchanged < 10:
        await asyncio.sleep(0.05)
        unchanged = unchanged + 1 if files == (files := open_files(process)) else 0
    return files


def assert_every_call_is_accounted_for(database: Path) -> None:
    """Each call that was begun is stored, refused, or open with a reason; none is both stored and open."""
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:

        def rows(statement: str) -> list[tuple[Any, ...]]:
            return connection.execute(statement).fetchall()

        unexplained = rows(
            "SELECT * FROM call_intents i WHERE outcome IS NULL AND NOT EXISTS (SELECT * FROM incomplete_flags f"
            " WHERE (f.rollout_id, f.model_call_id) = (i.rollout_id, i.model_call_id))"
        )
        assert unexplained == []
        assert rows("SELECT * FROM entries JOIN call_intents USING (rollout_id, model_call_id)") == []
        reasons = {reason for (reason,) in rows("SELECT DISTINCT reason FROM incomplete_flags")}
        assert {"lost_stream", "unknown_outcome"} <= reasons
        ((captured,),) = rows("SELECT count(*) FROM entries")
        assert captured > 0


@contextlib.asynccontextmanager
async def gateway(
    upstream: str, database: Path, *, streaming: Streaming
) -> AsyncIterator[tuple[str, Callable[[], int]]]:
    """A gateway in this process: its address, and how many connections to the engine it has, idle or not."""
    settings = GatewaySettings(drain_seconds=DRAIN_SECONDS, streaming=streaming)
    others = [found for found in gc.get_objects() if isinstance(found, Upstream)]
    app = create_app(upstream, TokenCaptureStore(database), settings=settings)
    (own,) = (found for found in gc.get_objects() if isinstance(found, Upstream) and found not in others)
    async with serving(app) as (url, _):
        async with aiohttp.ClientSession() as session, session.get(url + "/healthz") as response:
            assert response.status == 200
        connector: Any = own._opened().connector
        yield url, lambda: len(connector._acquired) + sum(map(len, connector._conns.values()))


@pytest.mark.skipif(sys.platform != "linux", reason="counts the open files in /proc")
async def test_after_hundreds_of_hang_ups_all_is_as_it_was(tmp_path: Path) -> None:
    engine = PolicyEngine(seconds_per_token=0.001, on_call=fail_sometimes)
    async with (
        serve_engine(engine) as upstream,
        gateway(upstream, tmp_path / "captures.db", streaming="auto") as (passing, pool),
        gateway(upstream, tmp_path / "captures.db", streaming="never") as (synthesising, other_pool),
    ):
        files, tasks = await at_rest(), asyncio.all_tasks()
        await asyncio.gather(HangingUp(passing, seed=1).run(120), HangingUp(synthesising, seed=2).run(60))
        assert len(engine.calls) > 50

        async def as_before() -> bool:
            return not (pool() or other_pool()) and asyncio.all_tasks() == tasks and open_files() == files

        with contextlib.suppress(TimeoutError):
            await until(as_before, 30)
        assert (pool(), other_pool()) == (0, 0)
        assert asyncio.all_tasks() == tasks
        assert open_files() == files
    assert_every_call_is_accounted_for(tmp_path / "captures.db")


@pytest.mark.skipif(sys.platform != "linux", reason="counts the open files in /proc")
async def test_a_server_process_is_as_it_was_too(tmp_path: Path) -> None:
    engine = PolicyEngine(seconds_per_token=0.001, on_call=fail_sometimes)
    environment = {"TOKCAP_DRAIN_SECONDS": str(DRAIN_SECONDS)}
    async with (
        serve_engine(engine) as upstream,
        served.serving(tmp_path / "captures.db", upstream, **environment) as server,
    ):

        async def started() -> bool:
            return (await server.get("/readyz"))[0] == 200

        await until(started, 60)
        files = await at_rest(server.process.pid)
        await HangingUp(server.url, seed=2).run(120)

        async def as_before() -> bool:
            return open_files(server.process.pid) == files

        with contextlib.suppress(TimeoutError):
            await until(as_before, 30)
        assert open_files(server.process.pid) == files
        _, text = await server.get("/metrics")
        seen = dict(re.findall(r"^(tokcap_\S+) (\S+)$", text.decode(), re.MULTILINE))
        assert (seen["tokcap_calls_in_flight"], seen["tokcap_streams_in_flight"]) == ("0.0", "0.0")
        ended = [float(value) for name, value in seen.items() if name.startswith("tokcap_calls_total")]
        assert sum(ended) == float(seen["tokcap_calls_begun_total"]) > 40
        assert "Traceback" not in "".join(server.lines)
    assert_every_call_is_accounted_for(tmp_path / "captures.db")
