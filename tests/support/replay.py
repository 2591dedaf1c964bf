"""An engine that answers with recorded traffic, and a gateway in front of it, both over real sockets.

The client names the recording in a header, which the gateway forwards. The engine answers only if
the request is the recorded one: so each test also proves what the gateway sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, Self

import aiohttp
import orjson
import uvicorn
from aiohttp import web

from token_id_capture.server.app import create_app
from token_id_capture.server.http.upstream import Upstream
from token_id_capture.server.listener import listen
from token_id_capture.server.settings import GatewaySettings
from token_id_capture.store import TokenCaptureStore
from token_id_capture.testing import replay as kit

RECORDINGS = Path(__file__).parents[1] / "data" / "recordings" / "vllm-0.32.0"
ADDED_TO_CHATS = {
    "logprobs": True,
    "top_logprobs": 0,
    "return_token_ids": True,
    "include_reasoning": True,
    "return_weight_versions": True,
}
ADDED_TO_COMPLETIONS = {"logprobs": 0, "return_token_ids": True}
APP_OPTIONS = ("engine", "api_key", "upstream_api_key", "operator_key", "shared_upstreams")


class Recording(kit.Recording):
    """One recorded call of vLLM."""

    @classmethod
    def named(cls, name: str) -> Self:
        return cls.load(RECORDINGS, name)

    @property
    def added(self) -> dict[str, Any]:
        """What a gateway adds to such a request."""
        return ADDED_TO_COMPLETIONS if self.path == "/v1/completions" else ADDED_TO_CHATS

    def client_request(self) -> dict[str, Any]:
        """The body without what the gateway adds: what a client sends that knows nothing of it."""
        body: dict[str, Any] = orjson.loads(self.sent)
        for name, value in self.added.items():
            if body.get(name) == value:
                del body[name]
        return body


@dataclass
class Received:
    """A request that the engine got."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def json(self) -> Any:
        return orjson.loads(self.body)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class ReplayEngine:
    """Answers by recording, or with ``handler`` where a test sets one. ``cut`` cuts streams into chunks."""

    url: str = ""
    received: list[Received] = field(default_factory=list)
    handler: Handler | None = None
    cut: Callable[[bytes], Iterable[bytes]] = lambda payload: [payload]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = [(name.decode(), value.decode()) for name, value in request.raw_headers]
        self.received.append(Received(request.method, request.raw_path, headers, body))
        if self.handler is not None:
            return await self.handler(request)
        recording = Recording.named(request.headers["x-recording"])
        if problem := difference(recording, request, body):
            return web.json_response({"error": {"message": problem}}, status=599)
        if recording.content_type.startswith("text/event-stream"):
            return await stream(request, self.cut(recording.payload))
        return web.Response(body=recording.payload, status=recording.status, content_type=recording.content_type)


def difference(recording: Recording, request: web.Request, body: bytes) -> str:
    """How a request differs from the recorded one; empty if it does not."""
    if (request.method, request.path_qs) != (recording.method, recording.path):
        return f"{request.method} {request.path_qs} instead of {recording.method} {recording.path}"
    try:
        sent, recorded = orjson.loads(body), orjson.loads(recording.sent)
    except orjson.JSONDecodeError:
        return "" if body == recording.sent else "another body"
    for parsed in (sent, recorded):
        for name in ("include_reasoning", "return_weight_versions"):
            parsed.pop(name, None)
    return "" if sent == recorded else f"{sent} instead of {recorded}"


async def stream(
    request: web.Request, chunks: Iterable[bytes], content_type: str = "text/event-stream; charset=utf-8"
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": content_type})
    await response.prepare(request)
    for chunk in chunks:
        await response.write(chunk)
    await response.write_eof()
    return response


@contextlib.asynccontextmanager
async def replay_engine() -> AsyncIterator[ReplayEngine]:
    """Serve a ``ReplayEngine`` on a loopback port."""
    engine = ReplayEngine()
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{rest:.*}", engine.answer)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield engine
    finally:
        await runner.cleanup()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@contextlib.asynccontextmanager
async def serving(app: Any, *, grace: int = 5, http: Any = "auto") -> AsyncIterator[tuple[str, uvicorn.Server]]:
    """Serve an ASGI application with uvicorn, as ``tokcap serve`` does, on a loopback port."""
    with listen(socket.AF_INET, ("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(
            app,
            http=http,
            log_config=None,
            access_log=False,
            ws="none",
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=grace,
        )
        server = _Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
        finally:
            server.should_exit = True
            await task


@dataclass
class Response:
    """What a client got; ``whole`` is false where the connection broke."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    whole: bool = True

    def json(self) -> Any:
        return orjson.loads(self.body)


@dataclass
class Gateway:
    """A running gateway, its engine, its store, and a client of it."""

    url: str
    engine: ReplayEngine
    store: TokenCaptureStore
    session: aiohttp.ClientSession
    server: uvicorn.Server
    app: Any

    def base(self, rollout: str = "r1") -> str:
        return f"{self.url}/ng-rollout/{rollout}/training-token-capture"

    async def request(
        self, method: str, url: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Response:
        async with self.session.request(method, url, data=body and BytesIO(body), headers=headers) as response:
            pieces: list[bytes] = []
            whole = True
            try:
                while piece := await response.content.readany():
                    pieces.append(piece)
            except aiohttp.ClientError:
                whole = False
            shown = [(name.decode(), value.decode()) for name, value in response.raw_headers]
            return Response(response.status, shown, b"".join(pieces), whole)

    async def post(self, path: str, body: Any, rollout: str = "r1", **headers: str) -> Response:
        raw = body if isinstance(body, bytes) else orjson.dumps(body)
        named = {"content-type": "application/json", **headers}
        return await self.request("POST", self.base(rollout) + path, raw, named)

    async def replay(self, name: str, body: Any = None, rollout: str = "r1") -> Response:
        """Send the recorded request without what the gateway adds, or with another body."""
        recording = Recording.named(name)
        headers = {"x-recording": name, "content-type": "application/json"}
        raw = body if isinstance(body, bytes) else orjson.dumps(recording.client_request() if body is None else body)
        return await self.request(recording.method, self.base(rollout) + recording.path, raw, headers)

    async def entry(self, rollout: str = "r1") -> Any:
        """The one entry of a rollout."""
        (entry,) = await self.store.read_entries(rollout)
        return entry

    async def flags(self, rollout: str = "r1") -> list[tuple[str, str]]:
        detail = await self.store.describe_rollout(rollout)
        return [(flag.reason, flag.detail) for flag in detail.flags]

    async def intents(self, rollout: str = "r1") -> list[str | None]:
        detail = await self.store.describe_rollout(rollout)
        return [intent.outcome for intent in detail.intents]


@contextlib.asynccontextmanager
async def running_gateway(
    database: Path, *, store: TokenCaptureStore | None = None, grace: int = 5, **options: Any
) -> AsyncIterator[Gateway]:
    """A gateway with a real store in front of a ``ReplayEngine``; ``options`` are settings or of ``create_app``."""
    async with replay_engine() as engine:
        store = store or TokenCaptureStore(database)
        upstream = options.pop("upstream", engine.url)
        given = {name: options.pop(name) for name in APP_OPTIONS if name in options}
        app = create_app(upstream, store, settings=GatewaySettings(**options), **given)
        async with (
            aiohttp.ClientSession(auto_decompress=False) as session,
            serving(app, grace=grace) as (url, server),
            TokenCaptureStore(database) as reader,
        ):
            yield Gateway(url, engine, reader, session, server, app)


def connector_to(engine: str) -> Any:
    """The pool of connections that a gateway in this process has to the engine at this address."""
    found = [it for it in gc.get_objects() if isinstance(it, Upstream) and str(it.url).rstrip("/") == engine]
    (upstream,) = found
    return upstream._opened().connector


async def until(condition: Callable[[], Awaitable[Any]], seconds: float = 60.0) -> Any:
    """Wait until the condition gives something true, and return it."""
    async with asyncio.timeout(seconds):
        while not (result := await condition()):  # noqa: ASYNC110  the condition may be anything
            await asyncio.sleep(0.01)
        return result
