"""A chat response as a Messages response."""

from __future__ import annotations

from typing import Any, Final

from token_id_capture.server.dialects.chat import ChatRequest, Ending, Finish, Generation, Usage, arguments_object
from token_id_capture.server.dialects.seal import seal

_REASONS: Final = {Finish.LENGTH: "max_tokens", Finish.CONTENT_FILTER: "refusal"}


def messages_response(generation: Generation, request: ChatRequest, shown_id: str) -> dict[str, Any]:
    """The whole response; ``shown_id`` is what its id is made of."""
    content: list[dict[str, Any]] = []
    if generation.reasoning:
        signature = seal(generation.reasoning)
        content.append({"type": "thinking", "thinking": generation.reasoning, "signature": signature})
    if generation.text or not (content or generation.calls):
        content.append({"type": "text", "text": generation.text})
    content.extend(
        {"type": "tool_use", "id": call.call_id, "name": call.name, "input": arguments_object(call.arguments)}
        for call in generation.calls
    )
    return {
        **message_head(request, shown_id),
        "content": content,
        **stop_of(generation.ending),
        "usage": usage_of(generation.ending.usage),
    }


def message_head(request: ChatRequest, shown_id: str) -> dict[str, Any]:
    """The members of a message that are known before it is generated."""
    return {"id": f"msg_{shown_id}", "type": "message", "role": "assistant", "model": request.client_model}


def stop_of(ending: Ending) -> dict[str, Any]:
    """``stop_reason`` and ``stop_sequence``. Forced calls finish with ``stop``, so that a call counts first."""
    reason, stopped_by = _REASONS.get(ending.finish), None
    if reason is None and ending.has_calls:
        reason = "tool_use"
    elif reason is None and ending.stop_string is not None:
        reason, stopped_by = "stop_sequence", ending.stop_string
    return {"stop_reason": reason or "end_turn", "stop_sequence": stopped_by}


def usage_of(usage: Usage) -> dict[str, Any]:
    """The counts; those of the prompt without what was cached."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }
