"""Connections: how long one may take to send a head, how many there may be, and writes that go out together.

uvicorn has none of it, and what has not sent a request yet has not shown a key.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.auto import AutoHTTPProtocol

_FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\nretry-after: 5\r\n"
    b"connection: close\r\ncontent-length: 31\r\n\r\nToo many connections are open.\n"
)


_LONGEST_HEAD: Final = 2**20
"""Bytes of a head that has not ended; httptools has no limit of its own."""


class _JoinedWrites:
    """A transport that sends what is written in one turn of the event loop together, such as a head and its body.

    uvloop has each write be a call of the system, which costs the client one, too.
    """

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._pieces: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._pieces:
            self._loop.call_soon(self._flush)
        self._pieces.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        pieces, self._pieces = self._pieces, []
        if pieces and not self._transport.is_closing():
            self._transport.writelines(pieces)


def limited_protocol(head_seconds: float, most: int) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol for one server.

    A connection has ``head_seconds`` from when it is accepted, or from the first byte of a further request, to the
    end of the request's head. Of more than ``most`` connections the one that has waited longest for its head is closed;
    where all have a request or are kept alive after one, the new one is answered with 503.
    """
    # In the order in which they began to wait.
    waiting: dict[asyncio.Protocol, asyncio.TimerHandle] = {}

    class Limited(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
        transport: Any
        cycle: Any
        head_bytes = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(_JoinedWrites(transport, self.loop))
            if len(self.connections) > most:
                if not waiting:
                    transport.write(_FULL)
                    transport.close()
                    return
                next(iter(waiting)).transport.abort()  # type: ignore[attr-defined]
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._end_wait()
                return
            if self not in waiting:
                self._wait()
            self.head_bytes += len(data)
            if self.head_bytes > _LONGEST_HEAD:
                self.transport.abort()

        def on_url(self, url: bytes) -> None:
            """What httptools read of the target; it drops a fragment, and the request would be sorted without it."""
            if b"#" in url:
                raise ValueError("a request target has no fragment")  # which is an invalid request: 400
            super().on_url(url)

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_wait()
            super().connection_lost(exc)

        def _wait(self) -> None:
            waiting[self] = self.loop.call_later(head_seconds, self.transport.close)

        def _end_wait(self) -> None:
            self.head_bytes = 0
            timer = waiting.pop(self, None)
            if timer is not None:
                timer.cancel()

    return Limited
