"""Child job: an engine that has its answers ready, and sends those of streams event by event."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from typing import Any, cast

from benchmark.child import wait_for_word
from benchmark.gateway.conversations import SHAPES, streamed_responses, whole_responses
from token_id_capture.server.listener import listen

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_NUMBER = re.compile(rb'"seed": ?(\d+)')
_PAUSE = re.compile(rb'"model": ?"bench-(\d+)ms"')
_STREAMED = re.compile(rb'"stream": ?true')
_HEAD_END = b"\r\n\r\n"
_WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


async def run(start: Callable[..., None], *, shape: str) -> dict[str, Any]:
    """Serve one shape of conversations until the parent speaks again."""
    workload = SHAPES[shape]
    whole = [_WHOLE % len(body) + body for body in whole_responses(workload)]
    streams = [[b"%x\r\n%b\r\n" % (len(event), event) for event in events] for events in streamed_responses(workload)]
    with listen(socket.AF_INET, ("127.0.0.1", 0)) as listener:
        loop = asyncio.get_running_loop()
        async with await loop.create_server(lambda: _Connection(whole, streams), sock=listener):
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            await asyncio.to_thread(start, url=url)
            await asyncio.to_thread(wait_for_word)
    return {}


class _Connection(asyncio.Protocol):
    """Answers one request after the other."""

    def __init__(self, whole: list[bytes], streams: list[list[bytes]]) -> None:
        self._whole = whole
        self._streams = streams
        self._received = bytearray()
        self._streaming: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._writable.set()
        if self._streaming is not None:
            self._streaming.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head = self._received.find(_HEAD_END)
        length = _LENGTH.search(self._received, 0, head + 2) if head >= 0 else None
        if head < 0 or len(self._received) < head + len(_HEAD_END) + int(length[1] if length else 0):
            return
        body = bytes(self._received[head + len(_HEAD_END) :])
        self._received.clear()
        number = _NUMBER.search(body)
        if number is None:  # a question for models or health
            self._transport.write(_WHOLE % 2 + b"{}")
        elif _STREAMED.search(body) is None:
            self._transport.write(self._whole[int(number[1])])
        else:
            pause = _PAUSE.search(body)
            seconds = int(pause[1]) / 1000 if pause else 0.0
            self._streaming = asyncio.create_task(self._stream(self._streams[int(number[1])], seconds))

    async def _stream(self, events: list[bytes], seconds: float) -> None:
        self._transport.write(_STREAM)
        for event in events:
            self._transport.write(event)
            await asyncio.sleep(seconds)  # also without a pause each event is a write of its own
            await self._writable.wait()
        self._transport.write(b"0\r\n\r\n")
