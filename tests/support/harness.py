"""Recorded scenarios of a harness: what it sent, and an engine that answers as it was answered."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

FOLDER = Path(__file__).parents[1] / "data" / "harness" / "opencode-1.18.33"
PREFIX = "/ng-rollout/demo-1/training-token-capture"
# What belongs to one connection of the recording.
NOT_SENT_AGAIN = {"connection", "host", "content-length", "accept-encoding", "authorization"}


@dataclass(frozen=True)
class Exchange:
    """One request of a scenario, and what became of it then."""

    label: str
    path: str
    headers: dict[str, str]
    body: bytes
    status: int | None
    payload: bytes
    fault: str | None

    @property
    def streams(self) -> bool:
        return self.payload.startswith(b"data:")


def exchanges(scenario: str, folder: Path = FOLDER) -> list[Exchange]:
    """The exchanges of a scenario in order."""
    directory = folder / scenario
    found = []
    for told in json.loads((directory / "exchanges.json").read_text())["exchanges"]:
        name = f"{told['n']:02}-request.json"
        request = _resolved(directory, name)
        body = orjson.dumps(request["body"])
        headers = {key: value for key, value in request["headers"].items() if key.lower() not in NOT_SENT_AGAIN}
        stream, response = (directory / f"{told['n']:02}-response.{kind}" for kind in ("sse", "json"))
        payload = b""
        if stream.exists():
            payload = stream.read_bytes()
        elif response.exists():
            payload = orjson.dumps(json.loads(response.read_text())["body"])
        answer = told["response"]
        path = request["path"].removeprefix(PREFIX)
        found.append(Exchange(told["label"], path, headers, body, answer["status"], payload, answer.get("fault")))
    return found


def _resolved(directory: Path, name: str) -> dict[str, Any]:
    """A request with what it only refers to."""
    request: dict[str, Any] = json.loads((directory / name).read_text())
    for part in ("body", "headers"):
        other = request[part].get(f"$same_{part}_as")
        if other is not None:
            request[part] = _resolved(directory, other)[part]
    return request


class ScenarioEngine:
    """Answers the requests of a scenario one after the other; ``stalls_until`` ends a stall."""

    def __init__(self, calls: list[Exchange]) -> None:
        self.waiting = list(calls)
        self.stalls_until = asyncio.Event()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        call = self.waiting.pop(0)
        assert request.transport is not None
        if call.status is None:
            request.transport.close()
            return web.Response()
        if not call.streams:
            return web.Response(body=call.payload, status=call.status, content_type="application/json")
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(call.payload)
        if call.fault == "stall":
            await self.stalls_until.wait()
        if call.fault in ("cut", "stall"):
            request.transport.close()
            return response
        await response.write_eof()
        return response


def with_token_ids(call: Exchange) -> Exchange:
    """The exchange as an engine would have answered it that sends the ids and log probabilities it was asked for.

    The stub always counted 42 tokens; the prompt has one id for each message, and one more.
    """
    if not call.streams or call.status != 200:
        return call
    frames = [json.loads(frame[6:]) for frame in call.payload.split(b"\n\n") if frame.startswith(b"data: {")]
    speaking = [frame for frame in frames if frame["choices"]]
    speaking[0]["prompt_token_ids"] = list(range(len(json.loads(call.body)["messages"]) + 1))
    for frame in frames:
        if isinstance(frame.get("usage"), dict):
            frame["usage"]["prompt_tokens"] = len(speaking[0]["prompt_token_ids"])
    left, first = 42, 1000 * len(json.loads(call.body)["messages"])
    for position, frame in enumerate(speaking[1:], 1):
        # The last one has what is left over, if the stream came so far.
        finished = frame["choices"][0]["finish_reason"] is not None
        count = left if finished else 2
        left -= count
        ids = [first + 50 * position + number for number in range(count)]
        content = [{"token": "x", "logprob": -0.25, "top_logprobs": []} for _ in ids]
        frame["choices"][0] |= {"token_ids": ids, "logprobs": {"content": content}}
    payload = b"".join(b"data: " + orjson.dumps(frame) + b"\n\n" for frame in frames)
    payload += b"data: [DONE]\n\n" if b"[DONE]" in call.payload else b""
    return Exchange(**{**call.__dict__, "payload": payload})
