"""Errors in the envelope that the clients of each dialect read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from token_id_capture.server.dialects.chat import Dialect

_MESSAGES_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
_GEMINI_STATUSES: Final = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    410: "FAILED_PRECONDITION",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
CONTEXT_LENGTH_CODE: Final = "context_length_exceeded"
"""The code by which clients of Responses know that they have to shorten their history."""

_CONTEXT_LENGTH: Final = re.compile(
    r"maximum context length|context length of|exceeds? the (available context size|model's (maximum )?context)"
    r"|longer than the model's context|maximum model length",
    re.IGNORECASE,
)


def chat_error(status: int, message: str, code: str | None) -> dict[str, Any]:
    """``{"error": {"message", "type", "param", "code"}}``, as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def messages_error(status: int, message: str, code: str | None) -> dict[str, Any]:
    """``{"type": "error", "error": {"type", "message"}}``."""
    kind = _MESSAGES_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def gemini_error(status: int, message: str, code: str | None) -> dict[str, Any]:
    """``{"error": {"code", "message", "status"}}``."""
    name = _GEMINI_STATUSES.get(status, "INVALID_ARGUMENT" if status < 500 else "INTERNAL")
    return {"error": {"code": status, "message": message, "status": name}}


def error_envelope(dialect: Dialect | None, status: int, message: str, code: str | None) -> dict[str, Any]:
    """The envelope of a dialect; None is a native call."""
    if dialect is Dialect.MESSAGES:
        # In Anthropic's words, on which Claude Code shortens its history.
        message = f"prompt is too long: {message}" if code == CONTEXT_LENGTH_CODE else message
        return messages_error(status, message, code)
    if dialect is Dialect.GEMINI:
        return gemini_error(status, message, code)
    return chat_error(status, message, code)


def error_of(status: int, body: Any) -> tuple[int, str, str]:
    """Status, message and code of an error in a chat response or a chat stream.

    A response with a successful status but without an answer counts as an error too (502).
    """
    error = body.get("error") if isinstance(body, Mapping) else None
    error = body if error is None and isinstance(body, Mapping) else error  # vLLM before 0.12 wrote it flat
    members = error if isinstance(error, Mapping) else {}
    message = members.get("message") or members.get("detail") or (error if isinstance(error, str) else None)
    told, code = members.get("code"), members.get("type")
    if type(told) is int and 400 <= told < 600 and status == 500:
        status = told
    elif isinstance(told, str):
        code = told
    text = message if isinstance(message, str) else f"the engine answered HTTP {status} without a message to translate"
    if status == 400 and is_context_length(text):
        code = CONTEXT_LENGTH_CODE
    return status if status >= 400 else 502, text, code if isinstance(code, str) else "server_error"


def abort_error() -> tuple[int, str, str]:
    """Status, message and code where the engine aborted a generation: nobody must act on half a response."""
    return 529, "the engine aborted the generation; try again", "server_error"


def is_context_length(message: str) -> bool:
    """Whether an engine says that the prompt is longer than it takes: vLLM, SGLang or llama-server."""
    return _CONTEXT_LENGTH.search(message) is not None
