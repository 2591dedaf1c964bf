"""A wire tap between the gateway and the engine: it forwards bytes as they come, and keeps a copy.

It is the witness. What the engine was asked and what it answered is read from here, with nothing of
the gateway's code.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import h11
import orjson

TAG_HEADER = "x-e2e-attempt"
"""A header that agents send; the gateway passes it on, so it names the attempt that an exchange belongs to."""


@dataclass
class Exchange:
    """One request and its response, as far as it came. ``whole``: the response came to its end."""

    method: str
    path: str
    tag: str
    request: bytes
    status: int = 0
    content_type: str = ""
    body: bytes = b""
    whole: bool = False

    @property
    def sent(self) -> dict[str, Any]:
        """The request's JSON object."""
        sent = orjson.loads(self.request) if self.request else {}
        return sent if isinstance(sent, dict) else {}


@dataclass
class _Connection:
    to_engine: bytearray = field(default_factory=bytearray)
    from_engine: bytearray = field(default_factory=bytearray)


class Tap:
    """Listens on ``port`` and connects whoever comes to the engine."""

    def __init__(self, engine_port: int) -> None:
        self.port = 0
        self._server: asyncio.Server | None = None
        self._engine_port = engine_port
        self._connections: list[_Connection] = []

    def exchanges(self) -> list[Exchange]:
        """All that went through so far, by connection."""
        return [exchange for connection in self._connections for exchange in _exchanges(connection)]

    def asked(self, text: bytes) -> int:
        """How often this stands in what went to the engine so far."""
        return sum(connection.to_engine.count(text) for connection in self._connections)

    async def open(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Refuse connections from now on, as the engine does when it is gone."""
        if self._server is not None:
            self._server.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        copy = _Connection()
        self._connections.append(copy)
        try:
            engine_reader, engine_writer = await asyncio.open_connection("127.0.0.1", self._engine_port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(
            _pump(reader, engine_writer, copy.to_engine), _pump(engine_reader, writer, copy.from_engine)
        )


@asynccontextmanager
async def tapped(engine_port: int) -> AsyncIterator[Tap]:
    """A tap in front of the engine."""
    tap = Tap(engine_port)
    await tap.open()
    try:
        yield tap
    finally:
        tap.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, copy: bytearray) -> None:
    """Forward until one side ends, then end the other: a hang-up must reach the engine."""
    try:
        while data := await reader.read(65536):
            copy += data
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


def _exchanges(connection: _Connection) -> Iterator[Exchange]:
    """Take the two byte streams of a connection apart; a request whose response is missing counts too."""
    asking, answering = h11.Connection(h11.SERVER), h11.Connection(h11.CLIENT)
    asking.receive_data(bytes(connection.to_engine))
    asking.receive_data(b"")
    answering.receive_data(bytes(connection.from_engine))
    answering.receive_data(b"")
    while isinstance(request := asking.next_event(), h11.Request):
        headers = {name.decode(): value.decode("latin-1") for name, value in request.headers}
        exchange = Exchange(request.method.decode(), request.target.decode(), headers.get(TAG_HEADER, ""), b"")
        exchange.request = _body(asking)
        answering.send(request)
        answering.send(h11.Data(exchange.request))
        answering.send(h11.EndOfMessage())
        response = _read_response(answering, exchange)
        yield exchange
        if response is None or not exchange.whole or answering.our_state is not h11.DONE:
            return
        asking.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
        asking.send(h11.EndOfMessage())
        if asking.our_state is not h11.DONE or answering.their_state is not h11.DONE:
            return
        asking.start_next_cycle()
        answering.start_next_cycle()


def _body(connection: h11.Connection) -> bytes:
    pieces: list[bytes] = []
    while isinstance(event := connection.next_event(), h11.Data):
        pieces.append(bytes(event.data))
    return b"".join(pieces)


def _read_response(connection: h11.Connection, exchange: Exchange) -> h11.Response | None:
    pieces: list[bytes] = []
    try:
        response = connection.next_event()
        while isinstance(response, h11.InformationalResponse):
            response = connection.next_event()
        if not isinstance(response, h11.Response):
            return None
        exchange.status = response.status_code
        exchange.content_type = dict(response.headers).get(b"content-type", b"").decode("latin-1")
        while isinstance(event := connection.next_event(), h11.Data):
            pieces.append(bytes(event.data))
        exchange.whole = isinstance(event, h11.EndOfMessage)
    except h11.RemoteProtocolError:
        response = None  # it broke off in the middle
    exchange.body = b"".join(pieces)
    return response if isinstance(response, h11.Response) else None
