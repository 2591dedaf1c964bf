"""A thousand clients that hang up: every call is complete, and no connection or file stays open."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import orjson
import pytest
from aiohttp import web
from made_up import BODY, CHAT, FIRST, STREAM, chat, delta, events, usage
from replay import Gateway, gateway, until

BATCH, BATCHES = 100, 10


class WaitingEngine:
    """Answers a first event, or nothing yet; the rest of all calls once it is let go on."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.ended = 0

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        streams = (await request.json()).get("stream")
        response = web.StreamResponse(headers={"content-type": "text/event-stream" if streams else "application/json"})
        try:
            if streams:
                await response.prepare(request)
                await response.write(events(FIRST, done=False)[0])
            await self.go_on.wait()
            if not streams:
                return web.Response(body=orjson.dumps(chat([5], [-0.1])), content_type="application/json")
            await response.write(b"".join(events(delta([10]), delta([11], "stop"), usage(2))))
            await response.write_eof()
        except OSError:
            pass  # a call that is not captured is cut off with its client
        finally:
            self.ended += 1
        return response


async def _hang_up(gate: Gateway, number: int, sent: asyncio.Event) -> None:
    """Send a request and vanish: before the answer, after its first event, with or without a reset."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gate.url.rpartition(":")[2]))
    body = orjson.dumps(STREAM if number % 3 else BODY)
    path = gate.base(f"r{number}").removeprefix(gate.url) + (CHAT if number % 5 else "/v1/responses")
    head = f"POST {path} HTTP/1.1\r\nHost: g\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    if number % 3 == 1:
        await reader.readuntil(b"\n\n")
    await sent.wait()
    if number % 2:
        writer.transport.abort()
    writer.close()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts files as Linux shows them")
async def test_after_a_thousand_hang_ups_connections_and_files_are_where_they_were(tmp_path: Path) -> None:
    async with gateway(tmp_path) as gate:
        engine = WaitingEngine()
        gate.engine.handler = engine
        # What the first call opens for good, such as the database.
        engine.go_on.set()
        await gate.post(CHAT, BODY, "first")
        assert len(await gate.store.read_entries("first")) == 1
        before = open_files()
        for batch in range(BATCHES):
            engine.go_on.clear()
            arrived, all_sent = len(gate.engine.received), asyncio.Event()
            numbers = range(batch * BATCH, (batch + 1) * BATCH)
            clients = [asyncio.create_task(_hang_up(gate, number, all_sent)) for number in numbers]

            async def dispatched(arrived: int = arrived) -> bool:
                return len(gate.engine.received) - arrived == BATCH

            await until(dispatched, 30)
            all_sent.set()
            await asyncio.gather(*clients)
            engine.go_on.set()

            async def ended(total: int = (batch + 1) * BATCH + 1) -> bool:
                return engine.ended == total

            await until(ended, 30)
        connector = gate.app._upstream._session.connector

        async def as_before() -> bool:
            return not connector._acquired and not any(connector._conns.values()) and open_files() <= before

        await until(as_before, 30)
        for number in range(BATCH * BATCHES):
            if number % 5 and number % 97 == 0:
                assert len(await gate.store.read_entries(f"r{number}")) == 1
