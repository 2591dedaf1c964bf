"""Recorded traffic of an engine through the real gateway, to try an engine adapter for ``--engine``.

Record what your engine answers to the requests that your engine adapter makes of them, one call in
``NAME.request.json`` with ``method``, ``path`` and ``body``, and ``NAME.response.json`` with ``status``,
``headers`` and ``body``; a stream byte for byte in ``NAME.response.sse``, and its ``status`` and
``headers`` in ``NAME.meta.json``. Then, in a test of yours::

    from token_id_capture.testing.replay import assert_replays, load_recordings

    async def test_my_engine() -> None:
        for recording in load_recordings(Path("recordings/my-engine")):
            await assert_replays(recording, MyEngine)

``replay`` gives what became of one call, to compare with what you know of it. No socket is opened
and no file is written.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeAlias

import orjson
from starlette.types import Scope

from token_id_capture.records import TokenEntry
from token_id_capture.server.check.in_memory import MemoryResponse, MemorySink, call_in_memory
from token_id_capture.server.engines.base import Endpoint, Engine
from token_id_capture.server.gateway import Gateway
from token_id_capture.server.http.exchange import Response
from token_id_capture.server.http.upstream import RawHeaders, UpstreamError
from token_id_capture.server.middleware import TokenCaptureMiddleware
from token_id_capture.server.settings import GatewaySettings

Cut: TypeAlias = Callable[[bytes], Iterable[bytes]]
"""How a payload is divided into the chunks that arrive."""


@dataclass(frozen=True)
class Recording:
    """One recorded call: what was sent to the engine, and what it answered."""

    name: str
    method: str
    path: str
    sent: bytes
    status: int
    content_type: str
    payload: bytes

    @classmethod
    def load(cls, folder: Path, name: str) -> Self:
        """Read the files of one call."""
        request = json.loads((folder / f"{name}.request.json").read_bytes())
        sent = request.get("body_text", "").encode() or (orjson.dumps(request["body"]) if "body" in request else b"")
        stream = folder / f"{name}.response.sse"
        response = json.loads((folder / f"{name}.{'meta' if stream.exists() else 'response'}.json").read_bytes())
        payload = stream.read_bytes() if stream.exists() else orjson.dumps(response["body"])
        content_type = response["headers"].get("content-type") or "application/json"
        return cls(name, request["method"], request["path"], sent, response["status"], content_type, payload)

    def plain_request(self, engine: Engine) -> bytes:
        """The request without what the engine adapter adds to it: that of a client that knows nothing of it."""
        body = orjson.loads(self.sent)
        endpoint = engine.paths[self.path]
        names = engine.request_fields(endpoint, body)
        added = engine.request_fields(endpoint, {name: body[name] for name in body.keys() - names.keys()})
        return orjson.dumps({name: value for name, value in body.items() if added.get(name) != value})


def load_recordings(folder: Path) -> list[Recording]:
    """All calls of a folder and the folders in it, by name."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.request.json"))
    return [Recording.load(folder, name.removesuffix(".request.json")) for name in names]


def whole(payload: bytes) -> list[bytes]:
    """All at once."""
    return [payload]


def bytewise(payload: bytes) -> list[bytes]:
    """Byte by byte."""
    return [payload[index : index + 1] for index in range(len(payload))]


def in_chunks(seed: int, longest: int = 200) -> Cut:
    """In chunks of 1 to ``longest`` bytes, the same ones for the same seed."""

    def cut(payload: bytes) -> Iterator[bytes]:
        numbers = random.Random(seed)
        start = 0
        while start < len(payload):
            end = start + numbers.randint(1, longest)
            yield payload[start:end]
            start = end

    return cut


@dataclass
class RecordedEngine:
    """Stands where the gateway has its connections: it gives one answer, and remembers what it was sent.

    ``answers`` are those to other paths than the recorded one, such as a tokenizer's. ``breaks`` is
    set where the connection breaks after the payload.
    """

    recording: Recording
    cut: Cut = whole
    answers: Mapping[str, Recording] = field(default_factory=dict)
    breaks: bool = False
    sent: list[tuple[str, bytes]] = field(default_factory=list)

    @asynccontextmanager
    async def open(self, scope: Scope, body: bytes, *, plain: bool) -> AsyncIterator[Response]:
        """Answer a request."""
        self.sent.append((scope["path"], body))
        known = scope["path"] == self.recording.path
        recording = self.recording if known else self.answers.get(scope["path"])
        if recording is None:
            raise UpstreamError(f"nothing is recorded for {scope['path']}", status=502, sent=False)
        yield _RecordedResponse(recording, self.cut if known else whole, breaks=self.breaks)


class _RecordedResponse:
    def __init__(self, recording: Recording, cut: Cut, *, breaks: bool) -> None:
        self.status = recording.status
        self.headers: RawHeaders = [(b"content-type", recording.content_type.encode())]
        self.is_event_stream = recording.content_type.startswith("text/event-stream")
        self._chunks = iter(cut(recording.payload))
        self._breaks = breaks

    async def read(self) -> bytes:
        payload = b"".join(self._chunks)
        self._break_off()
        return payload

    async def next_chunk(self) -> bytes:
        chunk = next(self._chunks, b"")
        if not chunk:
            self._break_off()
        return chunk

    def _break_off(self) -> None:
        if self._breaks:
            raise UpstreamError("the connection broke", status=502, sent=True)


@dataclass(frozen=True)
class Replayed:
    """What became of one call.

    ``marks`` are reasons with their particulars, ``refused`` what the engine answered where it
    refused, ``open`` is true if the call's intent is, ``sent`` what the engine was asked, by path.
    """

    entries: tuple[TokenEntry, ...]
    marks: tuple[str, ...]
    refused: tuple[str, ...]
    open: bool
    response: MemoryResponse
    sent: tuple[tuple[str, bytes], ...]

    def content(self) -> list[dict[str, Any]]:
        """The entries without what is different at each replay."""
        own = {"rollout_id", "model_call_id", "created_at"}
        return [entry.model_dump(exclude=own) for entry in sorted(self.entries, key=lambda entry: entry.model_call_id)]


async def replay(
    recording: Recording,
    engine: Engine,
    *,
    request: bytes | None = None,
    cut: Cut = whole,
    answers: Mapping[str, Recording] | None = None,
    settings: GatewaySettings | None = None,
    breaks: bool = False,
) -> Replayed:
    """Make the call of a recording through a gateway with this engine adapter.

    ``request`` is what the client sends: by default the recorded request without the engine adapter's
    fields. ``answers`` are what the engine answers on other paths.
    """
    recorded = RecordedEngine(recording, cut, answers or {}, breaks)
    gateway = Gateway(recorded, engine, settings)
    return await replay_through(gateway, recorded, recording.plain_request(engine) if request is None else request)


async def replay_through(gateway: Gateway, recorded: RecordedEngine, request: bytes) -> Replayed:
    """Make the call of ``recorded`` through a gateway in front of it, which may have served others of the rollout."""
    sink, before = MemorySink(), len(recorded.sent)
    app = TokenCaptureMiddleware(gateway, sink=sink)
    response = await call_in_memory(app, recorded.recording.method, recorded.recording.path, request)
    return Replayed(
        tuple(sink.entries),
        tuple(sink.marks),
        tuple(sink.refusals),
        bool(sink.open_calls),
        response,
        tuple(recorded.sent[before:]),
    )


async def assert_replays(
    recording: Recording,
    make_engine: Callable[[], Engine],
    *,
    answers: Mapping[str, Recording] | None = None,
    settings: GatewaySettings | None = None,
) -> Replayed:
    """Replay a call whole, byte by byte and in chunks, and hold the gateway's promises against what became of it.

    Raises:
        AssertionError: it differs with the chunks; the call has neither entries nor a reason for
            having none, or both; or the client saw ids that it had not asked for.
    """

    async def replayed(cut: Cut) -> Replayed:
        return await replay(recording, make_engine(), cut=cut, answers=answers, settings=settings)

    name = recording.name
    first = await replayed(whole)
    for cut in (bytewise, in_chunks(1), in_chunks(2, longest=3)):
        other = await replayed(cut)
        assert other.content() == first.content(), f"{name}: the entries depend on the chunks"
        assert other.response.body == first.response.body, f"{name}: the client's bytes depend on the chunks"
        assert other.marks == first.marks, f"{name}: the reason depends on the chunks"
    assert first.response.status == recording.status, f"{name}: another status than the engine's"
    assert bool(first.entries) != bool(first.marks or first.refused), f"{name}: stored and refused, or neither"
    assert first.open == bool(first.marks), f"{name}: the intent is open without a reason, or closed with one"
    if make_engine().paths[recording.path] is Endpoint.GENERATE:
        return first  # ids are what such an endpoint answers
    hidden = [ids.tolist() for entry in first.entries for ids in (entry.prompt_token_ids, entry.generation_token_ids)]
    shown = [array for part in _parts(first.response.body) for array in _arrays(part)]
    assert not [ids for ids in hidden if len(ids) > 1 and ids in shown], f"{name}: the client sees token ids"
    return first


def _parts(body: bytes) -> Iterator[Any]:
    """The JSON documents of a response: itself, or the data of its events."""
    for line in body.splitlines() if b"data:" in body[:6] else [body]:
        try:
            yield orjson.loads(line.removeprefix(b"data:"))
        except orjson.JSONDecodeError:
            continue


def _arrays(value: Any) -> Iterator[list[Any]]:
    if isinstance(value, list):
        yield value
    for inner in value if isinstance(value, list) else value.values() if isinstance(value, Mapping) else ():
        yield from _arrays(inner)
