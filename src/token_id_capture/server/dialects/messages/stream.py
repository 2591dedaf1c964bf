"""The events of a Messages stream.

The grammar is ``message_start (content_block_start content_block_delta* content_block_stop)* message_delta
message_stop``, as Anthropic's reference on streaming has it; ``error`` may come in the place of the rest.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from token_id_capture.server.dialects.blocks import Block, BlockKind
from token_id_capture.server.dialects.chat import ChatRequest, Ending, Usage
from token_id_capture.server.dialects.errors import messages_error
from token_id_capture.server.dialects.messages.response import message_head, stop_of, usage_of
from token_id_capture.server.dialects.seal import seal

_DELTAS: Final = {
    BlockKind.REASONING: ("thinking_delta", "thinking"),
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.CALL: ("input_json_delta", "partial_json"),
}


class MessagesWriter:
    """Writes one stream."""

    def __init__(self, request: ChatRequest, shown_id: str) -> None:
        self._head = message_head(request, shown_id)
        self._blocks = 0

    def start(self) -> bytes:
        # The counts are not known yet; clients take those of message_delta.
        head = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage_of(Usage())}
        return _event("message_start", {"message": head})

    def open(self, block: Block) -> bytes:
        self._blocks += 1
        content: dict[str, Any] = {"type": "text", "text": ""}
        if block.kind is BlockKind.REASONING:
            content = {"type": "thinking", "thinking": "", "signature": ""}
        elif block.kind is BlockKind.CALL:
            content = {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
        return _event("content_block_start", {"index": block.index, "content_block": content})

    def append(self, block: Block, piece: str) -> bytes:
        kind, member = _DELTAS[block.kind]
        return _delta(block, {"type": kind, member: piece})

    def close(self, block: Block) -> bytes:
        signed = b""
        if block.kind is BlockKind.REASONING:
            signed = _delta(block, {"type": "signature_delta", "signature": seal(block.text)})
        return signed + _event("content_block_stop", {"index": block.index})

    def finish(self, ending: Ending) -> bytes:
        empty = b""
        if not self._blocks:
            block = Block(BlockKind.TEXT, index=0)
            empty = self.open(block) + self.close(block)
        delta = {"delta": stop_of(ending), "usage": usage_of(ending.usage)}
        return empty + _event("message_delta", delta) + _event("message_stop", {})

    def fail(self, status: int, message: str, code: str) -> bytes:
        return b"event: error\ndata: " + orjson.dumps(messages_error(status, message, code)) + b"\n\n"


def _delta(block: Block, delta: dict[str, Any]) -> bytes:
    return _event("content_block_delta", {"index": block.index, "delta": delta})


def _event(name: str, members: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps({"type": name, **members}) + b"\n\n"
