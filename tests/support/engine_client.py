"""A client of the testing engine, and the events of its streams."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 60, "seed": 1}


class Client:
    """Posts to one engine."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self.session = url, session

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with self.session.post(
            self.url + path, data=body if isinstance(body, str) else json.dumps(body)
        ) as response:
            return response.status, await response.json()

    async def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        status, response = await self.post("/v1/chat/completions", body)
        assert status == 200, response
        answer: dict[str, Any] = response
        return answer

    async def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200
            return events(await response.read())


def events(raw: bytes) -> list[dict[str, Any]]:
    frames = raw.decode().removesuffix("\n\n").split("\n\n")
    assert frames.pop() == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]
