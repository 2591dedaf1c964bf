"""From the deltas of a chat stream to blocks, of which one is open at a time and none opens twice.

Engines may mix pieces of several tool calls, and text between them. What comes while its block may not be
written waits, and nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import orjson

from token_id_capture.server.dialects.chat import Ending, made_call_id, reasoning_of


class BlockKind(StrEnum):
    """What a block holds."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """A part of a response; ``index`` counts from 0 in the order in which blocks are opened."""

    kind: BlockKind
    index: int = -1
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What the block holds so far."""
        return "".join(self.pieces)


class BlockWriter(Protocol):
    """Writes the events of one dialect. Each method returns the bytes of what it has to say."""

    def start(self) -> bytes:
        """The stream begins."""
        ...

    def open(self, block: Block) -> bytes:
        """A block begins; none is open."""
        ...

    def append(self, block: Block, piece: str) -> bytes:
        """The open block continues."""
        ...

    def close(self, block: Block) -> bytes:
        """The open block is whole."""
        ...

    def finish(self, ending: Ending) -> bytes:
        """The generation is whole; all blocks are closed."""
        ...

    def fail(self, status: int, message: str, code: str) -> bytes:
        """The generation failed; nothing follows."""
        ...


class LateCallPieceError(Exception):
    """An engine went on with a tool call whose arguments were whole and whose block was closed."""


class Blocks:
    """Puts deltas in order for one writer."""

    def __init__(self, writer: BlockWriter, shown_id: str) -> None:
        self._writer = writer
        self._shown_id = shown_id
        self._opened = 0
        self._open: Block | None = None
        self._waiting: list[Block] = []
        self._calls: dict[int, Block] = {}

    @property
    def has_calls(self) -> bool:
        """Whether a tool call was begun."""
        return bool(self._calls)

    def add(self, delta: Mapping[str, Any]) -> bytes:
        """Take a delta.

        Raises:
            LateCallPieceError: it cannot be written any more.
        """
        written = b""
        if reasoning := reasoning_of(delta):
            written += self._add_piece(BlockKind.REASONING, reasoning)
        content = delta.get("content")
        if isinstance(content, str) and content:
            written += self._add_piece(BlockKind.TEXT, content)
        calls = delta.get("tool_calls")
        if isinstance(calls, list):
            for position, call in enumerate(calls):
                if isinstance(call, Mapping):
                    written += self._add_call(call, position)
        return written

    def end(self) -> bytes:
        """Write what waits, and close all."""
        written = self._close()
        for block in self._waiting:
            pieces, block.pieces = block.pieces, []
            written += self._begin(block)
            if text := "".join(pieces):
                written += self._append(block, text)
            written += self._close()
        self._waiting.clear()
        return written

    def _add_piece(self, kind: BlockKind, piece: str) -> bytes:
        block = self._open
        if block is not None and block.kind is kind and not self._waiting:
            return self._append(block, piece)
        written = self._make_room()
        if written is None:
            if not self._waiting or self._waiting[-1].kind is not kind:
                self._waiting.append(Block(kind))
            self._waiting[-1].pieces.append(piece)
            return b""
        block = Block(kind)
        return written + self._begin(block) + self._append(block, piece)

    def _add_call(self, call: Mapping[str, Any], position: int) -> bytes:
        index = call["index"] if type(call.get("index")) is int else position
        function = call.get("function")
        function = function if isinstance(function, Mapping) else {}
        name, piece = function.get("name"), function.get("arguments")
        piece = _text(piece)
        block = self._calls.get(index)
        if block is None:
            block = self._calls[index] = Block(BlockKind.CALL)
            block.call_id = _text(call.get("id")) or made_call_id(self._shown_id, index)
            block.name = _text(name)
            return self._begin_call(block, piece)
        block.name = block.name or _text(name)
        if block is self._open:
            return self._append(block, piece) if piece else b""
        if block.index >= 0:  # closed
            if piece.strip():
                raise LateCallPieceError(f"the engine went on with tool call {index} after its arguments were whole")
            return b""
        block.pieces.append(piece)
        return b""

    def _begin_call(self, block: Block, piece: str) -> bytes:
        written = self._make_room() if block.name else None
        if written is None:
            self._waiting.append(block)
            block.pieces.append(piece)
            return b""
        written += self._begin(block)
        return written + self._append(block, piece) if piece else written

    def _make_room(self) -> bytes | None:
        """Close the open block if it is known to be whole; None if what comes next must wait."""
        if self._waiting:
            return None
        if self._open is not None and self._open.kind is BlockKind.CALL and not _is_json(self._open.text):
            return None  # and all that follows waits, so that a long call is not read again with each piece
        return self._close()

    def _begin(self, block: Block) -> bytes:
        block.index = self._opened
        self._opened += 1
        self._open = block
        return self._writer.open(block)

    def _append(self, block: Block, piece: str) -> bytes:
        block.pieces.append(piece)
        return self._writer.append(block, piece)

    def _close(self) -> bytes:
        block, self._open = self._open, None
        return b"" if block is None else self._writer.close(block)


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
