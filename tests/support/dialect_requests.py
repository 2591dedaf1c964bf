"""Requests of each dialect, as short as a test wants them."""

from __future__ import annotations

from typing import Any

from token_id_capture.server.dialects.chat import Dialect
from token_id_capture.server.dialects.paths import Target

MESSAGES, RESPONSES = Target(Dialect.MESSAGES), Target(Dialect.RESPONSES)
GEMINI = Target(Dialect.GEMINI, model="gemini-x")
USER: dict[str, Any] = {"role": "user", "content": "hi"}
CALL = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "café"}}


def messages(*turns: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 9, "messages": list(turns) or [USER], **more}


def responses(*items: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "input": list(items) or "hi", **more}


def gemini(*contents: Any, **more: Any) -> dict[str, Any]:
    return {"contents": list(contents) or [{"role": "user", "parts": [{"text": "hi"}]}], **more}
