"""The response level: an engine's whole answer to a chat, from its bytes to the client's and a durable record."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson

from benchmark.inputs import Call, record_of
from benchmark.stores import JsonLines, Ours

_REQUEST = {
    "model": "policy",
    "messages": [{"role": "user", "content": "Go on."}],
    "temperature": 1.0,
    "max_completion_tokens": 2048,
}


class JsonLinesResponse(JsonLines):
    """Parse the response, take out what belongs to a record, append it. The client is not served."""

    form = "response"

    async def handle(self, call: Call) -> float:
        start = time.perf_counter()
        response = orjson.loads(call.body)
        choice = response["choices"][0]
        log_probs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        text = choice["message"]["content"]
        await self.append(record_of(call, response["prompt_token_ids"], choice["token_ids"], log_probs, text))
        return time.perf_counter() - start


class GatewayResponse(Ours):
    """The gateway's own handling of a captured call, between an upstream and a client that are not there.

    It takes the engine's bytes, makes the record, stores it, and makes the bytes that the client is
    sent, in which the token arrays are hidden as it had not asked for them.
    """

    form = "response"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        from token_id_capture.capture.context import CaptureContext
        from token_id_capture.capture.recorder import CallRecorder
        from token_id_capture.server.call import CapturedCall
        from token_id_capture.server.engines import make_engine
        from token_id_capture.server.engines.base import Endpoint
        from token_id_capture.server.http.client import Client
        from token_id_capture.server.settings import GatewaySettings
        from token_id_capture.server.wire.prompt_cache import KnownTexts
        from token_id_capture.server.wire.request import CallBody

        body = CallBody.parse(Endpoint.CHAT, orjson.dumps(_REQUEST))
        assert body is not None
        self._body = body
        # What "auto" settles on when the upstream is vLLM.
        self._engine = make_engine("vllm")
        self._known = KnownTexts()
        self._settings = GatewaySettings()
        self._context, self._recorder, self._call, self._client = CaptureContext, CallRecorder, CapturedCall, Client
        self._scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}

    async def handle(self, call: Call) -> float:
        start = time.perf_counter()
        recorder = self._recorder(self._context(call.rollout_id, call.call_id, self.store))
        served = _Served()
        await self._call(
            self._client(self._scope, _listen, served.send),
            self._body,
            b"",
            recorder,
            engine=self._engine,
            upstream=_Replay(call.body),  # type: ignore[arg-type]
            settings=self._settings,
            known=self._known,
        ).run()
        seconds = time.perf_counter() - start
        if not recorder.context.committed or not 0 < served.size < len(call.body) // 2:
            raise RuntimeError(f"call {call.call_id} was not captured and served")
        return seconds


class _Replay:
    """An upstream that answers with one prepared body; also the answer."""

    status = 200
    is_event_stream = False

    def __init__(self, body: bytes) -> None:
        self._body = body
        self.headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]

    @asynccontextmanager
    async def open(self, scope: Any, body: bytes, *, plain: bool) -> AsyncIterator[_Replay]:
        yield self

    async def read(self) -> bytes:
        return self._body


class _Served:
    """A client that counts what it is sent."""

    size = 0

    async def send(self, message: Any) -> None:
        self.size += len(message.get("body", b""))


async def _listen() -> Any:
    """A client that does not hang up."""
    await asyncio.get_running_loop().create_future()
