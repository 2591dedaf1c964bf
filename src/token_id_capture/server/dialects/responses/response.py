"""A chat response as a Responses response."""

from __future__ import annotations

from time import time
from typing import Any, Final

from token_id_capture.server.dialects.blocks import Block, BlockKind
from token_id_capture.server.dialects.chat import ChatRequest, ClientTool, Ending, Finish, Generation, Usage
from token_id_capture.server.dialects.responses.tools import custom_input
from token_id_capture.server.dialects.seal import seal

_INCOMPLETE: Final = {Finish.LENGTH: "max_output_tokens", Finish.CONTENT_FILTER: "content_filter"}


def responses_response(generation: Generation, request: ChatRequest, shown_id: str) -> dict[str, Any]:
    """The whole response; ``shown_id`` is what its ids are made of."""
    blocks: list[Block] = []
    if generation.reasoning:
        blocks.append(Block(BlockKind.REASONING, pieces=[generation.reasoning]))
    if generation.text or not (blocks or generation.calls):
        blocks.append(Block(BlockKind.TEXT, pieces=[generation.text]))
    blocks.extend(
        Block(BlockKind.CALL, call_id=call.call_id, name=call.name, pieces=[call.arguments])
        for call in generation.calls
    )
    items = ItemWriter(request, shown_id)
    output: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        block.index = index
        output.append(items.whole(block))
    return ended_response(response_head(request, shown_id), output, generation.ending)


def response_head(request: ChatRequest, shown_id: str) -> dict[str, Any]:
    """A response that nothing was generated of yet."""
    return {
        "id": f"resp_{shown_id}",
        "object": "response",
        "created_at": int(time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": request.client_model,
        "output": [],
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        **request.echoed,
    }


def ended_response(head: dict[str, Any], output: list[dict[str, Any]], ending: Ending) -> dict[str, Any]:
    """The response with what was generated."""
    why = _INCOMPLETE.get(ending.finish)
    return {
        **head,
        "status": "completed" if why is None else "incomplete",
        "incomplete_details": None if why is None else {"reason": why},
        "output": output,
        "usage": usage_of(ending.usage),
    }


def usage_of(usage: Usage) -> dict[str, Any]:
    """The counts."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }


class ItemWriter:
    """Makes the items of one response."""

    def __init__(self, request: ChatRequest, shown_id: str) -> None:
        self._tools = request.tools
        self._seals = request.seals_reasoning
        self._shown_id = shown_id

    def tool_of(self, block: Block) -> ClientTool:
        """What the client calls the tool of a call; an unknown one has the name that the engine wrote."""
        return self._tools.get(block.name) or ClientTool(block.name)

    def item_id(self, block: Block) -> str:
        """The id of a block's item."""
        prefix = {BlockKind.REASONING: "rs", BlockKind.TEXT: "msg"}.get(block.kind)
        if prefix is None:
            prefix = "ctc" if self.tool_of(block).custom else "fc"
        return f"{prefix}_{self._shown_id}_{block.index}"

    def begun(self, block: Block) -> dict[str, Any]:
        """The item as it is added: without content."""
        if block.kind is BlockKind.REASONING:
            return {"id": self.item_id(block), "type": "reasoning", "summary": [], "content": []}
        if block.kind is BlockKind.TEXT:
            return {**self._message(block), "status": "in_progress", "content": []}
        return {**self._call(block, ""), "status": "in_progress"}

    def whole(self, block: Block) -> dict[str, Any]:
        """The item when it is done."""
        if block.kind is BlockKind.REASONING:
            item = {**self.begun(block), "content": [self.part(block)]}
            return {**item, "encrypted_content": seal(block.text)} if self._seals else item
        if block.kind is BlockKind.TEXT:
            return {**self._message(block), "status": "completed", "content": [self.part(block)]}
        return {**self._call(block, block.text), "status": "completed"}

    def part(self, block: Block, *, empty: bool = False) -> dict[str, Any]:
        """The content part of a message or of reasoning."""
        text = "" if empty else block.text
        if block.kind is BlockKind.REASONING:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _message(self, block: Block) -> dict[str, Any]:
        return {"id": self.item_id(block), "type": "message", "role": "assistant"}

    def _call(self, block: Block, arguments: str) -> dict[str, Any]:
        tool = self.tool_of(block)
        item: dict[str, Any] = {"id": self.item_id(block), "call_id": block.call_id, "name": tool.name}
        if tool.namespace is not None:
            item["namespace"] = tool.namespace
        if tool.custom:
            return {**item, "type": "custom_tool_call", "input": custom_input(arguments)}
        return {**item, "type": "function_call", "arguments": arguments}
