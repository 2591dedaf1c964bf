"""One captured stream: events are passed on as they come, and the last ones once the call is stored.

The last part begins with the event in which the last choice gets its finish reason. A client that
has seen it may act on the call, so from there on everything waits until the entries are durable.
What is before it never waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Final

import orjson

from token_id_capture import reasons
from token_id_capture.capture.recorder import CallRecorder
from token_id_capture.server.engines.base import Reader
from token_id_capture.server.http.client import Client, HangUpLimit
from token_id_capture.server.http.exchange import Response
from token_id_capture.server.http.upstream import UpstreamError
from token_id_capture.server.text.sse import DONE, Event, EventParser
from token_id_capture.server.wire.chunk_runs import ChunkRun, ChunkShapes
from token_id_capture.server.wire.fast_parse import BodyReader
from token_id_capture.server.wire.redaction import ClientView, is_usage_only
from token_id_capture.server.wire.request import CallBody
from token_id_capture.server.wire.response import EngineResponse, StreamMerger

_logger = logging.getLogger(__name__)

_EVENT_END: Final = b"\n\n"
_TAIL_SECONDS: Final = 5.0
"""How long an engine may take to close a stream after its last event."""


class StreamedResponse:
    """Passes one stream on and collects it; ``commit`` stores what was collected."""

    def __init__(
        self,
        client: Client,
        response: Response,
        body: CallBody,
        reader: Reader,
        bodies: BodyReader,
        view: ClientView,
        recorder: CallRecorder,
        commit: Callable[[Callable[[], EngineResponse]], Awaitable[None]],
    ) -> None:
        self._client = client
        self._response = response
        self._read_chunk = bodies.chunk
        self._view = view
        self._recorder = recorder
        self._commit = commit
        self._parser = EventParser()
        self._shapes = ChunkShapes(view, packed=bodies.packed)
        self._merger = StreamMerger(reader, body.endpoint, body.expected_choices)
        self._held: list[bytes] = []
        self._holding = False
        self._done = False
        self._error: str | None = None
        self._unreadable = 0
        self._withheld = False
        self._left_out = False
        self._fault: str | None = None

    async def run(self, limit: HangUpLimit) -> None:
        """Serve the stream to its end, or break the client's connection as the engine's broke."""
        # What is hidden makes it shorter, should the engine have said how long it is.
        headers = [(name, value) for name, value in self._response.headers if name.lower() != b"content-length"]
        await self._client.start(self._response.status, headers)
        problem = "neither [DONE] nor the token count came"
        try:
            await self._pass_on()
            ended = self._done or self._complete or self._error is not None or self._fault is not None
            whole = ended and not self._withheld
        except UpstreamError as error:
            problem, whole = str(error), False
        limit.lift()
        await self._settle(problem)
        await self._client.write(b"".join(self._held))
        if whole:
            await self._pass_tail()
        else:
            # The response stays unfinished, which breaks the connection: it must not look whole.
            await self._client.write(self._rest())

    @property
    def _complete(self) -> bool:
        """Whether the engine said that this is the end, in one of the two ways it can."""
        if self._merger.unfinished:
            return False
        return self._done or (self._merger.generated and self._merger.counted)

    async def _settle(self, problem: str) -> None:
        """Store the call, or mark it with the reason why not."""
        if self._error is not None:
            await self._recorder.flag(reasons.UNKNOWN_OUTCOME, self._error)
        elif self._fault is not None:
            await self._recorder.flag(reasons.CAPTURE_FAILED, self._fault)
        elif self._unreadable:
            detail = f"{self._unreadable} of the stream's events are not JSON objects"
            await self._recorder.flag(reasons.INVALID_TOKENS, detail)
        elif self._complete:
            await self._commit(self._merger.response)
        else:
            unfinished = "".join(f"; choice {index} has no finish reason" for index in self._merger.unfinished)
            await self._recorder.flag(
                reasons.LOST_STREAM, ("the stream ended early" if self._done else problem) + unfinished
            )

    async def _pass_on(self) -> None:
        """Pass events on until the stream says that it is done, or ends."""
        try:
            while not self._done and (chunk := await self._response.next_chunk()):
                passed: list[bytes] = []
                for visible in self._take_all(chunk):
                    (self._held if self._holding else passed).append(visible)
                await self._client.write(b"".join(passed))
        finally:
            self._collect_runs()

    def _take_all(self, data: bytes) -> Iterator[bytes]:
        """Collect the events that ``data`` completes, and give what the client sees of them, in turn."""
        start = 0
        while start < len(data):
            if (run := self._run_from(data, start)) is not None:
                start = run.end
                self._left_out = False
                yield run.visible
                continue
            found = data.find(_EVENT_END, start)
            end = len(data) if found < 0 else found + len(_EVENT_END)
            yield from map(self._take, self._parser.feed(data[start:end]))
            start = end

    def _run_from(self, data: bytes, start: int) -> ChunkRun | None:
        """The events from ``start`` on that are of one known shape; what they say is collected later."""
        if self._done or not self._parser.between_events:
            return None
        run = None if self._shapes.due else self._shapes.run(data, start)
        if run is None and self._collect_runs():
            run = self._shapes.run(data, start)
        return run

    def _collect_runs(self) -> bool:
        """Collect what the latest runs say, and tell whether that was anything."""
        if (chunk := self._shapes.read()) is None:
            return False
        self._collect(chunk)
        return True

    def _take(self, event: Event) -> bytes:
        """Collect an event, and return what the client sees of it and of the line feed before it."""
        visible = self._collect_event(event)
        before, self._left_out = self._left_out, not visible
        if event.after_cr:
            # The line feed goes with the event that it ends, whether the client sees this one or not.
            own = visible[1:]
            return own if before else b"\n" + own
        return visible

    def _rest(self) -> bytes:
        """What the client sees of what follows the last whole event."""
        rest = self._parser.rest
        return self._view.text(rest[1:] if self._left_out and self._parser.rest_after_cr else rest)

    def _collect_event(self, event: Event) -> bytes:
        """Collect an event, and return what the client sees of it."""
        data = event.data
        if data is None:
            return event.raw
        if data == DONE:
            self._done = self._holding = True
            return event.raw
        read = self._read_chunk(data)
        chunk = read.parsed
        if not isinstance(chunk, dict):
            self._unreadable += not self._done
        elif not self._done:  # what comes after the end is not part of the response
            if chunk.get("error") is not None and not chunk.get("choices"):
                self._error = self._error or _error_message(chunk["error"])
                self._holding = True
            else:
                self._collect(chunk)
                self._shapes.learn(event, chunk)
                self._holding = self._holding or self._merger.generated or is_usage_only(chunk)
        try:
            return self._view.event(event, read)
        except ValueError as error:
            # Without this event the stream must not look whole.
            _logger.warning("an event of a stream is not passed on: %s", error)
            self._withheld = True
            return b""

    def _collect(self, chunk: Mapping[str, Any]) -> None:
        """Whatever goes wrong in reading what the engine sent, its bytes still reach the client."""
        if self._fault is not None:
            return
        try:
            self._merger.add(chunk)
        except Exception as error:
            _logger.exception("reading a chunk failed")
            self._fault = f"{type(error).__name__}: {error}"

    async def _pass_tail(self) -> None:
        """Pass on what follows the end, until the engine closes the stream; then close the client's."""
        try:
            async with asyncio.timeout(_TAIL_SECONDS):
                while chunk := await self._response.next_chunk():
                    await self._client.write(b"".join(self._take_all(chunk)))
        except (TimeoutError, UpstreamError):
            pass  # the call is whole and stored; how the connection ends is of no matter
        await self._client.finish(self._rest())


def _error_message(error: Any) -> str:
    message = error.get("message") if isinstance(error, Mapping) else error
    return message if isinstance(message, str) else orjson.dumps(error).decode()
