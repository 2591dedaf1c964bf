"""What a model server calls while it serves one request.

``set_token_sink`` binds the request to its rollout, its call and its sink; the ASGI middleware does
that for HTTP servers. Then, in this order::

    await register_call_intent()      before the engine is asked; its failure fails the call
    response = await generate()
    await capture_tokens(response)    before the response is released; it never fails the call

From the intent on, whatever goes wrong marks the rollout incomplete and is logged. If even the mark
fails, the intent is still open, and an open intent makes the snapshot incomplete. A cancelled call
is the same: nothing is written, and its open intent says that it was lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from token_id_capture import reasons
from token_id_capture.capture.context import (
    CaptureContext,
    current_capture_context,
    reset_token_sink,
    set_token_sink,
)
from token_id_capture.capture.recorder import LOG_PROB_PLACEHOLDER_LIMIT, CallRecorder
from token_id_capture.records import TokenEntry

__all__ = [
    "LOG_PROB_PLACEHOLDER_LIMIT",
    "CaptureContext",
    "capture_tokens",
    "commit_choices",
    "commit_entry",
    "current_capture_context",
    "mark_current_call",
    "refuse_current_call",
    "register_call_intent",
    "reset_token_sink",
    "set_token_sink",
]


async def register_call_intent() -> None:
    """Record the intent of the current call durably, before it is dispatched. Without a context: nothing.

    Raises:
        Exception: whatever ``begin_call`` of the sink raises. The call must not be dispatched then;
            no tokens were spent.
    """
    if (recorder := _recorder()) is not None:
        await recorder.begin()


async def capture_tokens(response: Mapping[str, Any] | BaseModel) -> None:
    """Record the tokens of a complete response (Responses or chat shape) before it is released.

    A pydantic model counts as what its ``model_dump`` gives.

    Call it before a conversion or a stream synthesis drops the arrays. Never raises an
    ``Exception``: no arrays, malformed arrays and a failed write flag the rollout with the reason.
    Without a context, or when the call is committed already: nothing.
    """
    if (recorder := _recorder()) is not None:
        await recorder.capture(response)


async def commit_entry(entry: TokenEntry) -> None:
    """Record an entry that the engine side built itself. Never raises an ``Exception``.

    Its rollout and call ids must be those of the context; else it is not written, and the rollout
    is flagged. Without a context: nothing.
    """
    if (recorder := _recorder()) is None:
        return
    context = recorder.context
    if (entry.rollout_id, entry.model_call_id) == (context.rollout_id, context.model_call_id):
        await recorder.commit([entry])
    else:
        named = f"the entry names call {entry.model_call_id!r} of rollout {entry.rollout_id!r}"
        await recorder.flag(reasons.ID_MISMATCH, named)


async def commit_choices(entries: Sequence[TokenEntry]) -> None:
    """Record the choices of the current call as ``CallRecorder.commit`` does."""
    if (recorder := _recorder()) is not None:
        await recorder.commit(entries)


async def mark_current_call(reason: str, detail: str = "") -> None:
    """Flag the current call's rollout incomplete, with one of ``reasons``. Never raises an ``Exception``."""
    if (recorder := _recorder()) is not None:
        await recorder.flag(reason, detail)


async def refuse_current_call(detail: str) -> None:
    """Close the current call's intent: the engine refused it and generated nothing. Never raises an ``Exception``."""
    if (recorder := _recorder()) is not None:
        await recorder.refuse(detail)


def _recorder() -> CallRecorder | None:
    context = current_capture_context()
    return None if context is None else CallRecorder(context)
