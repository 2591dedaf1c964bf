"""The events of a Responses stream, numbered from 0 without a gap."""

from __future__ import annotations

from typing import Any, Final

import orjson

from token_id_capture.server.dialects.blocks import Block, BlockKind
from token_id_capture.server.dialects.chat import ChatRequest, Ending
from token_id_capture.server.dialects.errors import CONTEXT_LENGTH_CODE
from token_id_capture.server.dialects.responses.response import ItemWriter, ended_response, response_head
from token_id_capture.server.dialects.responses.tools import custom_input

_NAMES: Final = {BlockKind.REASONING: "response.reasoning_text", BlockKind.TEXT: "response.output_text"}
_ARGUMENTS: Final = "response.function_call_arguments"
_CUSTOM: Final = "response.custom_tool_call_input"


class ResponsesWriter:
    """Writes one stream."""

    def __init__(self, request: ChatRequest, shown_id: str) -> None:
        self._head = response_head(request, shown_id)
        self._items = ItemWriter(request, shown_id)
        self._output: list[dict[str, Any]] = []
        self._sequence = 0

    def start(self) -> bytes:
        begun = {"response": self._head}
        return self._event("response.created", begun) + self._event("response.in_progress", begun)

    def open(self, block: Block) -> bytes:
        written = self._event("response.output_item.added", self._place(block, item=self._items.begun(block)))
        if block.kind is BlockKind.CALL:
            return written
        part = self._items.part(block, empty=True)
        return written + self._event("response.content_part.added", self._part_place(block, part=part))

    def append(self, block: Block, piece: str) -> bytes:
        if block.kind is BlockKind.CALL:
            if self._items.tool_of(block).custom:
                return b""  # its text is known once its JSON is whole
            return self._event(f"{_ARGUMENTS}.delta", self._item_place(block, delta=piece))
        members = self._part_place(block, delta=piece)
        if block.kind is BlockKind.TEXT:
            members["logprobs"] = []
        return self._event(f"{_NAMES[block.kind]}.delta", members)

    def close(self, block: Block) -> bytes:
        item = self._items.whole(block)
        self._output.append(item)
        written = self._close_call(block) if block.kind is BlockKind.CALL else self._close_part(block)
        return written + self._event("response.output_item.done", self._place(block, item=item))

    def finish(self, ending: Ending) -> bytes:
        empty = b""
        if not self._output:  # an answer without an item would be missing in the client's history
            block = Block(BlockKind.TEXT, index=0)
            empty = self.open(block) + self.close(block)
        response = ended_response(self._head, self._output, ending)
        return empty + self._event(f"response.{response['status']}", {"response": response})

    def fail(self, status: int, message: str, code: str) -> bytes:
        known = code if code in (CONTEXT_LENGTH_CODE, "rate_limit_exceeded") else "server_error"
        error = {"code": "rate_limit_exceeded" if status == 429 else known, "message": message}
        response = {**self._head, "status": "failed", "error": error, "output": self._output}
        return self._event("response.failed", {"response": response})

    def _close_part(self, block: Block) -> bytes:
        done = self._part_place(block, text=block.text)
        if block.kind is BlockKind.TEXT:
            done["logprobs"] = []
        part = self._part_place(block, part=self._items.part(block))
        return self._event(f"{_NAMES[block.kind]}.done", done) + self._event("response.content_part.done", part)

    def _close_call(self, block: Block) -> bytes:
        if self._items.tool_of(block).custom:
            text = custom_input(block.text)
            delta = self._event(f"{_CUSTOM}.delta", self._item_place(block, delta=text))
            return delta + self._event(f"{_CUSTOM}.done", self._item_place(block, input=text))
        name = self._items.tool_of(block).name
        return self._event(f"{_ARGUMENTS}.done", self._item_place(block, name=name, arguments=block.text))

    def _place(self, block: Block, **members: Any) -> dict[str, Any]:
        return {"output_index": block.index, **members}

    def _item_place(self, block: Block, **members: Any) -> dict[str, Any]:
        return self._place(block, item_id=self._items.item_id(block), **members)

    def _part_place(self, block: Block, **members: Any) -> dict[str, Any]:
        return self._item_place(block, content_index=0, **members)

    def _event(self, name: str, members: dict[str, Any]) -> bytes:
        data = orjson.dumps({"type": name, "sequence_number": self._sequence, **members})
        self._sequence += 1
        return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
