"""From the bytes of a chat stream to the bytes of a dialect's stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from token_id_capture.server.dialects.blocks import Blocks, BlockWriter, LateCallPieceError
from token_id_capture.server.dialects.chat import Ending, Finish, Usage, read_finish, stop_string_of
from token_id_capture.server.dialects.errors import abort_error, error_of
from token_id_capture.server.text.sse import DONE, EventParser


class TranslatedStream:
    """Translates one stream. The terminal event is written by ``end`` alone, once the chat stream is whole.

    The gateway holds everything from the finishing chunk back until the entries are durable, so whatever
    follows it here, the close of the last block and the terminal event, waits for the commit too.
    """

    def __init__(self, writer: BlockWriter, shown_id: str) -> None:
        self._writer = writer
        self._blocks = Blocks(writer, shown_id)
        self._parser = EventParser()
        self._finish: Finish | None = None
        self._stop_string: str | None = None
        self._usage: Any = None
        self._done = False
        self._ended = False

    def start(self) -> bytes:
        """What comes before the first chunk."""
        return self._writer.start()

    def feed(self, chunk: bytes) -> bytes:
        """Translate the bytes that have arrived."""
        written: list[bytes] = []
        for event in self._parser.feed(chunk):
            data = event.data
            if data is None or self._ended or self._done:
                continue
            if data == DONE:
                self._done = True
                if self._finish is not None:
                    written.append(self._end())
                continue
            try:
                parsed = orjson.loads(data)
            except orjson.JSONDecodeError:
                continue  # the gateway flagged it
            if isinstance(parsed, dict):
                written.append(self._take(parsed))
        return b"".join(written)

    def end(self) -> bytes | None:
        """The chat stream ended properly. None: it is not whole, and the client's must not end properly either."""
        if self._ended:
            return b""
        whole = self._finish is not None and (self._done or self._usage is not None)
        return self._end() if whole else None

    def _take(self, chunk: Mapping[str, Any]) -> bytes:
        if chunk.get("error") is not None and not chunk.get("choices"):
            self._ended = True
            return self._writer.fail(*error_of(500, chunk))
        if chunk.get("usage") is not None:
            self._usage = chunk["usage"]
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, Mapping) and choice.get("index", 0) == 0:
                return self._take_choice(choice)
        return b""

    def _take_choice(self, choice: Mapping[str, Any]) -> bytes:
        delta = choice.get("delta")
        written = b""
        if isinstance(delta, Mapping):
            try:
                written = self._blocks.add(delta)
            except LateCallPieceError as error:
                self._ended = True
                return self._writer.fail(502, str(error), "invalid_response")
        if choice.get("finish_reason") is not None:
            self._finish = read_finish(choice["finish_reason"])
            self._stop_string = stop_string_of(choice)
        return written

    def _end(self) -> bytes:
        self._ended = True
        if self._finish is Finish.ABORT:
            return self._writer.fail(*abort_error())
        blocks = self._blocks.end()
        ending = Ending(self._finish or Finish.STOP, Usage.of(self._usage), self._blocks.has_calls, self._stop_string)
        return blocks + self._writer.finish(ending)
