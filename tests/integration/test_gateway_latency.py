"""How long one client waits that makes one call at a time: what no count of calls per second shows."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles
from time import perf_counter

import aiohttp
import pytest
import uvloop

from support import replay
from support.made_up import BODY, CHAT, answering, chat
from support.replay import replay_engine
from support.served import serving
from token_id_capture.server.listener import listen

SCRIPTS = Path(__file__).parents[2] / "scripts"
CALLS = 25
# Some three bare proxies' time goes into two transactions and what they wait for; 40 ms would be thirty.
LIMIT = 12.0
# Each transaction waits for one; others that use the disk may double it.
SYNCS = 4


@pytest.mark.parametrize("loop", [asyncio.SelectorEventLoop, uvloop.new_event_loop])
def test_accepted_connections_send_small_writes_at_once(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def option() -> int:
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with listen(socket.AF_INET, ("127.0.0.1", 0)) as listener:
            async with await asyncio.start_server(note, sock=listener):
                _, writer = await asyncio.open_connection(*listener.getsockname())
                found = await accepted
                writer.close()
                await writer.wait_closed()
                return found

    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(option())


@pytest.mark.alone
async def test_a_single_call_takes_a_few_times_as_long_as_through_a_bare_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    from benchmark.gateway.bare import bare_proxy
    from benchmark.measure import fsync_seconds

    async with replay_engine() as engine, aiohttp.ClientSession() as session:
        engine.handler = answering(chat([5, 6], [-0.1, -0.2]))

        async def call(url: str) -> float:
            began = perf_counter()
            async with session.post(url, json=BODY) as response:
                await response.read()
            assert response.status == 200
            return perf_counter() - began

        async with (
            replay.serving(bare_proxy(engine.url)) as (bare, _),
            serving(tmp_path / "captures.db", engine.url, "--engine", "vllm") as ours,
        ):
            urls = (bare + CHAT, ours.url + ours.base() + CHAT)
            syncs = [fsync_seconds(tmp_path)]
            times = [[await call(url) for url in urls] for _ in range(CALLS)]
            syncs.append(fsync_seconds(tmp_path))
    # The quarter that was served fastest: a wait for an acknowledgement would be in every call.
    through_bare, through_ours = (quantiles(of_one, n=4)[0] for of_one in zip(*times, strict=True))
    limit = LIMIT * through_bare + SYNCS * max(syncs)
    assert through_ours < limit, f"{through_ours * 1e3:.1f} ms, limit {limit * 1e3:.1f} ms"
