"""The client's side of one HTTP exchange, which may end before the exchange does.

In ASGI a client that hangs up is a message like any other, ``{"type": "http.disconnect"}``, and comes only to a
caller that asks. So while the engine answers, one task waits in ``receive`` for it::

    client   POST /v1/chat/completions ... {"stream": true}          hangs up
    receive  {"type": "http.request", "body": b"...", ...}            {"type": "http.disconnect"}
    engine                             data: {...}   data: {...}      data: {...}  data: [DONE]
    gateway                            passed on     passed on        read and stored, for at most drain_seconds

The call continues without its client, since what the policy samples after that still belongs to the rollout.
Writes to a client that is gone are dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from starlette.types import Message, Receive, Scope, Send

from token_id_capture.server.http.errors import send_error
from token_id_capture.server.http.upstream import RawHeaders
from token_id_capture.server.text.compression import READABLE_CODINGS, TooLongError, decompress


class ClientGoneError(Exception):
    """The client hung up, and its time is over."""


class RefusedRequestError(Exception):
    """The gateway does not take the request; ``status`` and ``code`` are those of the answer, the text its message."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class ValueCount:
    """Counts what would become objects if a body was parsed, before it is.

    40 MB of ``{},`` would be 2 GB, and take seconds in which nobody else is served. Braces and commas in texts
    are counted as well, so the limits are far above what is ever said in a conversation.
    """

    _MOST_CONTAINERS: Final = 1_000_000
    _MOST_VALUES: Final = 8_000_000

    def __init__(self) -> None:
        self._containers = 0
        self._values = 0
        self._size = 0
        self._uncounted: list[bytes] = []

    def add(self, piece: bytes) -> None:
        """Count those of a piece.

        Raises:
            RefusedRequestError: they are too many.
        """
        self._size += len(piece)
        self._uncounted.append(piece)
        if self._size <= self._MOST_CONTAINERS:
            return  # so few bytes hold no more values
        while self._uncounted:
            piece = self._uncounted.pop()
            self._containers += piece.count(b"{") + piece.count(b"[")
            self._values += piece.count(b",")
        if self._containers > self._MOST_CONTAINERS or self._values > self._MOST_VALUES:
            message = "The request body has millions of objects, arrays or values."
            raise RefusedRequestError(413, "too_many_values", message)


class HangUpLimit:
    """A time limit that starts to run when the client hangs up."""

    def __init__(self, timeout: asyncio.Timeout, seconds: float, hung_up: Callable[[], Awaitable[None]]) -> None:
        self._timeout = timeout
        self._seconds = seconds
        self._watcher = asyncio.create_task(self._watch(hung_up))

    async def _watch(self, hung_up: Callable[[], Awaitable[None]]) -> None:
        await hung_up()
        if not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time() + self._seconds)

    def lift(self) -> None:
        """End the limit: what follows is finished even if nobody listens, so nobody needs to watch."""
        self._watcher.cancel()
        if not self._timeout.expired():
            self._timeout.reschedule(None)

    async def end(self) -> None:
        """Stop watching. Where the limit was lifted the watcher is mostly gone, and no turn of the loop is needed."""
        watcher = self._watcher
        del self._watcher  # they would keep each other until garbage is collected
        watcher.cancel()
        if not watcher.cancelled():
            await asyncio.gather(watcher, return_exceptions=True)


class Client:
    """Reads the request, and writes the response for as long as somebody listens."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.gone = False
        self.started = False
        self._receive = receive
        self._send = send

    async def read_body(self, limit: int, *, longest_silence: float, take: Callable[[int], None]) -> bytes:
        """The request body, at most ``limit`` bytes of it, with at most so many seconds between its pieces.

        ``take`` is told how many bytes each piece has, and may refuse it.

        Raises:
            ClientGoneError: the client hung up before it had sent all.
            RefusedRequestError: it is longer, nothing more came for too long, or it has too many values.
        """
        pieces: list[bytes] = []
        size = 0
        values = ValueCount()
        if self._announced() > limit:
            raise _too_large(limit)  # before it has all come
        while True:
            try:
                async with asyncio.timeout(longest_silence):
                    message = await self._receive()
            except TimeoutError:
                problem = f"Nothing more of the request came for {longest_silence:g} s."
                raise RefusedRequestError(408, "request_timeout", problem) from None
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            piece: bytes = message.get("body", b"")
            size += len(piece)
            if size > limit:
                raise _too_large(limit)
            take(len(piece))
            values.add(piece)
            pieces.append(piece)
            if not message.get("more_body", False):
                return b"".join(pieces)

    def _announced(self) -> int:
        """How long the client says that its body is; 0 if it does not."""
        values = [value for name, value in self.scope["headers"] if name.lower() == b"content-length"]
        return int(values[0][:20]) if values and values[0].isdigit() else 0

    async def decompressed(self, body: bytes, limit: int, *, take: Callable[[int], None]) -> bytes:
        """The body without the codings of ``content-encoding``, which the engine is not told of then.

        Raises:
            RefusedRequestError: it is longer than ``limit`` bytes, damaged, in another coding, or has too many values.
        """
        values = [value for name, value in self.scope["headers"] if name.lower() == b"content-encoding"]
        codings = [coding.strip().lower() for value in values for coding in value.decode("latin-1").split(",")]
        codings = [coding for coding in codings if coding not in ("", "identity")]
        if unknown := [coding for coding in codings if coding not in READABLE_CODINGS]:
            message = f"Request bodies may be compressed with gzip or deflate, not with {unknown[0]}."
            raise RefusedRequestError(415, "unsupported_coding", message)
        try:
            for _ in codings:
                body = await asyncio.to_thread(decompress, body, limit)
        except TooLongError:
            raise _too_large(limit) from None
        except ValueError:
            message = f"The request body does not match its content-encoding ({', '.join(codings)})."
            raise RefusedRequestError(400, "invalid_coding", message) from None
        if codings:
            take(len(body))
            await asyncio.to_thread(ValueCount().add, body)
            kept = [(name, value) for name, value in self.scope["headers"] if name.lower() != b"content-encoding"]
            self.scope = dict(self.scope, headers=kept)
        return body

    async def start(self, status: int, headers: RawHeaders) -> None:
        """Send the head of the response."""
        self.started = True
        await self._deliver({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        """Send a piece of the body. Does nothing once the client is gone."""
        if data:
            await self._deliver({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes = b"") -> None:
        """Send the last piece of the body. A response that is never finished breaks the connection."""
        await self._deliver({"type": "http.response.body", "body": data, "more_body": False})

    async def response(self, status: int, headers: RawHeaders, body: bytes) -> None:
        """Send a whole response."""
        await self.start(status, headers)
        await self.finish(body)

    async def send_error(self, status: int, message: str, code: str, **headers: str) -> None:
        """Send an error of the gateway's own."""
        self.started = True
        await send_error(self.scope, self._receive, self._deliver, status, message, code, **headers)

    async def limit_after_hang_up(self, seconds: float, work: Callable[[HangUpLimit], Awaitable[None]]) -> None:
        """Do ``work``, watch for the client's hanging up meanwhile, and cancel it ``seconds`` later.

        Raises:
            ClientGoneError: that happened.
        """
        try:
            async with asyncio.timeout(None) as timeout:
                limit = HangUpLimit(timeout, seconds, self._hung_up)
                try:
                    await work(limit)
                finally:
                    await limit.end()
        except TimeoutError:
            if not timeout.expired():
                raise
            raise ClientGoneError from None

    async def _hung_up(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True

    async def _deliver(self, message: Message) -> None:
        if self.gone:
            return
        try:
            await self._send(message)
        except OSError:
            # ASGI 2.4 and later: servers say so where the connection is closed.
            self.gone = True


def _too_large(limit: int) -> RefusedRequestError:
    message = f"The request body is longer than {limit} bytes, which TOKCAP_BODY_LIMIT of the gateway sets."
    return RefusedRequestError(413, "request_too_large", message)
