"""A chat response as a generateContent response."""

from __future__ import annotations

from typing import Any, Final

from token_id_capture.server.dialects.chat import (
    ChatRequest,
    Ending,
    Finish,
    Generation,
    ToolCall,
    Usage,
    arguments_object,
)
from token_id_capture.server.dialects.seal import seal

_REASONS: Final = {Finish.LENGTH: "MAX_TOKENS", Finish.CONTENT_FILTER: "SAFETY", Finish.ABORT: "OTHER"}


def gemini_response(generation: Generation, request: ChatRequest, shown_id: str) -> dict[str, Any]:
    """The whole response; ``shown_id`` is its id."""
    parts: list[dict[str, Any]] = []
    if generation.reasoning and request.shows_reasoning:
        parts.append(thought_part(generation.reasoning))
    if generation.text:
        parts.append({"text": generation.text})
    parts.extend(last_parts(generation.calls, generation.reasoning))
    return ended_response(parts or [{"text": ""}], generation.ending, request, shown_id)


def thought_part(text: str) -> dict[str, Any]:
    """A part of reasoning."""
    return {"text": text, "thought": True}


def last_parts(calls: list[ToolCall], reasoning: str) -> list[dict[str, Any]]:
    """The calls. The first part carries the reasoning, for clients drop thoughts and keep signatures."""
    parts: list[dict[str, Any]] = [
        {"functionCall": {"id": call.call_id, "name": call.name, "args": arguments_object(call.arguments)}}
        for call in calls
    ]
    if reasoning:
        parts = parts or [{"text": ""}]
        parts[0]["thoughtSignature"] = seal(reasoning)
    return parts


def ended_response(parts: list[dict[str, Any]], ending: Ending, request: ChatRequest, shown_id: str) -> dict[str, Any]:
    """A response, or the last one of a stream, with why it ended and what it took."""
    response = partial_response(parts, request, shown_id)
    response["candidates"][0]["finishReason"] = _REASONS.get(ending.finish, "STOP")
    response["usageMetadata"] = usage_of(ending.usage)
    return response


def partial_response(parts: list[dict[str, Any]], request: ChatRequest, shown_id: str) -> dict[str, Any]:
    """A response of a stream."""
    return {
        "candidates": [{"content": {"role": "model", "parts": parts}, "index": 0}],
        "modelVersion": request.client_model,
        "responseId": shown_id,
    }


def usage_of(usage: Usage) -> dict[str, Any]:
    """The counts; those of reasoning are not among the candidate's."""
    return {
        "promptTokenCount": usage.prompt,
        "candidatesTokenCount": usage.completion - usage.reasoning,
        "totalTokenCount": usage.prompt + usage.completion,
        **({"cachedContentTokenCount": usage.cached} if usage.cached else {}),
        **({"thoughtsTokenCount": usage.reasoning} if usage.reasoning else {}),
    }
