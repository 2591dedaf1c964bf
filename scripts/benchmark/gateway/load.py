"""Child job: clients that ask, so many at a time, each on a connection that it keeps."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from itertools import count
from time import perf_counter
from typing import Any, cast
from urllib.parse import urlsplit

from benchmark.gateway.conversations import SHAPES, Question, questions

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_WARM_UP_CALLS = 2


async def run(
    start: Callable[..., None],
    *,
    url: str,
    path: str,
    rollouts: str,
    shape: str,
    streamed: bool,
    pause_ms: int,
    concurrency: int,
    seconds: float,
) -> dict[str, Any]:
    """Ask for so many seconds. ``path`` has a place for the rollout's id, of which each begins with ``rollouts``.

    Returns the seconds to the first byte of each response's body and to its end, and how many calls were made
    besides, to warm up.
    """
    address = urlsplit(url)
    host, port = address.hostname or "127.0.0.1", address.port or 80
    conversations = questions(SHAPES[shape])
    clients = [_Client(path, f"{rollouts}-{number}", address.netloc) for number in range(concurrency)]
    for number, client in enumerate(clients):
        await asyncio.get_running_loop().create_connection(lambda: client, host, port)  # noqa: B023
        client.conversation = conversations[number % len(conversations)]
    options: dict[str, Any] = {"streamed": streamed, "pause_ms": pause_ms}
    await asyncio.gather(*(client.ask_for(0.0, _WARM_UP_CALLS, **options) for client in clients))
    for client in clients:
        client.take_times()
    await asyncio.to_thread(start)
    began = perf_counter()
    await asyncio.gather(*(client.ask_for(seconds, 1, **options) for client in clients))
    took = perf_counter() - began
    times = [pair for client in clients for pair in client.take_times()]
    for client in clients:
        client.close()
    return {
        "first": [first for first, _ in times],
        "whole": [whole for _, whole in times],
        "warm_up": _WARM_UP_CALLS * concurrency,
        "seconds": took,
    }


class _Client(asyncio.Protocol):
    """One agent after the other, on one connection."""

    conversation: list[Question]

    def __init__(self, path: str, name: str, host: str) -> None:
        self._path = path
        self._name = name
        self._host = host.encode()
        self._times: list[tuple[float, float]] = []
        self._received = bytearray()
        self._calls = self._turns()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(ConnectionError(f"the server closed the connection of {self._name}: {error}"))

    def close(self) -> None:
        """Hang up."""
        self._transport.close()

    def take_times(self) -> list[tuple[float, float]]:
        """The times of the calls since the last time."""
        taken, self._times = self._times, []
        return taken

    async def ask_for(self, seconds: float, at_least: int, *, streamed: bool, pause_ms: int) -> None:
        """Ask until the time is over, and so many times at least."""
        until = perf_counter() + seconds
        while at_least > 0 or perf_counter() < until:
            at_least -= 1
            path, question = next(self._calls)
            body = question.body(streamed=streamed, pause_ms=pause_ms)
            self._received.clear()
            self._body = self._end = -1
            self._first = 0.0
            self._done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
            began = perf_counter()
            self._transport.write(
                b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\naccept: */*\r\n"
                b"authorization: Bearer none\r\ncontent-length: %d\r\n\r\n%b" % (path, self._host, len(body), body)
            )
            ended = await self._done
            self._times.append((self._first - began, ended - began))

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._body < 0:
            self._read_head()
        if self._body < 0:
            return
        if not self._first and len(self._received) > self._body:
            self._first = perf_counter()
        whole = len(self._received) >= self._end if self._end >= 0 else self._received.endswith(_LAST_CHUNK)
        if whole and not self._done.done():
            self._done.set_result(perf_counter())

    def _read_head(self) -> None:
        head = self._received.find(b"\r\n\r\n")
        if head < 0:
            return
        if not self._received.startswith(b"HTTP/1.1 200"):
            self._done.set_exception(RuntimeError(f"the server answered {bytes(self._received[:500])!r}"))
        self._body = head + 4
        length = _LENGTH.search(self._received, 0, head + 2)
        self._end = self._body + int(length[1]) if length else -1

    def _turns(self) -> Iterator[tuple[bytes, Question]]:
        for number in count():
            path = self._path.format(rollout=f"{self._name}-{number}").encode()
            for question in self.conversation:
                yield path, question
