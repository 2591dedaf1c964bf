"""Child job: clients that read streamed chats, so many at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import aiohttp

_QUESTION = "Tell me about the river that runs past the old mill, and about the people who lived there. " * 4


async def run(
    start: Callable[..., None], *, url: str, captured: bool, streams: int, requests: int, tokens: int
) -> dict[str, Any]:
    """Each of ``streams`` clients asks ``requests`` times; the seconds to the first token and to the end of each."""
    first: list[float] = []
    whole: list[float] = []

    async def read(session: aiohttp.ClientSession, client: int, seed: int) -> None:
        prefix = f"/ng-rollout/stream-{client}/training-token-capture" if captured else ""
        body = {
            "messages": [{"role": "user", "content": _QUESTION}],
            "max_tokens": tokens,
            "seed": seed,
            "stream": True,
        }
        began = time.perf_counter()
        first_token = 0.0
        async with session.post(f"{url}{prefix}/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if not first_token and b'"delta":' in line and b'"role":' not in line:
                    first_token = time.perf_counter() - began
        assert first_token, "the stream had no token"
        first.append(first_token)
        whole.append(time.perf_counter() - began)

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        for request in range(requests):
            await read(session, number, number * requests + request)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(read(session, 0, seed) for seed in range(4)))
        first.clear()
        whole.clear()
        await asyncio.to_thread(start)
        await asyncio.gather(*(client(session, number) for number in range(streams)))
    return {"first": first, "whole": whole, "warm_up": 4}
