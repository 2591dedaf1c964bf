"""The responses of a generateContent stream: text as it comes, and each call whole in the last one."""

from __future__ import annotations

from typing import Any

import orjson

from token_id_capture.server.dialects.blocks import Block, BlockKind
from token_id_capture.server.dialects.chat import ChatRequest, Ending, ToolCall
from token_id_capture.server.dialects.errors import gemini_error
from token_id_capture.server.dialects.gemini.response import (
    ended_response,
    last_parts,
    partial_response,
    thought_part,
)


class GeminiWriter:
    """Writes one stream: server-sent events, or without ``as_events`` one JSON array."""

    def __init__(self, request: ChatRequest, shown_id: str, *, as_events: bool) -> None:
        self._request = request
        self._shown_id = shown_id
        self._as_events = as_events
        self._calls: list[ToolCall] = []
        self._reasoning: list[str] = []
        self._is_first = True

    def start(self) -> bytes:
        return b""

    def open(self, block: Block) -> bytes:
        return b""

    def append(self, block: Block, piece: str) -> bytes:
        if block.kind is BlockKind.TEXT:
            return self._partial({"text": piece})
        if block.kind is BlockKind.REASONING:
            self._reasoning.append(piece)
            return self._partial(thought_part(piece)) if self._request.shows_reasoning else b""
        return b""

    def close(self, block: Block) -> bytes:
        if block.kind is BlockKind.CALL:
            self._calls.append(ToolCall(block.call_id, block.name, block.text))
        return b""

    def finish(self, ending: Ending) -> bytes:
        parts = last_parts(self._calls, "".join(self._reasoning)) or [{"text": ""}]
        written = self._written(ended_response(parts, ending, self._request, self._shown_id))
        return written if self._as_events else written + b"]"

    def fail(self, status: int, message: str, code: str) -> bytes:
        written = self._written(gemini_error(status, message, code))
        return written if self._as_events else written + b"]"

    def _partial(self, part: dict[str, Any]) -> bytes:
        return self._written(partial_response([part], self._request, self._shown_id))

    def _written(self, response: dict[str, Any]) -> bytes:
        data = orjson.dumps(response)
        if self._as_events:
            return b"data: " + data + b"\r\n\r\n"
        before, self._is_first = b"[" if self._is_first else b",\r\n", False
        return before + data
