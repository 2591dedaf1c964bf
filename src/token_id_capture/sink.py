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

import logging
from collections.abc import Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from time import time
from typing import Any, Final, cast

from pydantic import ValidationError

from token_id_capture import reasons
from token_id_capture.errors import (
    ConflictingEntryError,
    InvalidEntryError,
    RolloutFrozenError,
    RolloutRetiredError,
)
from token_id_capture.protocols import CallIntents, TokenSink, missing_methods
from token_id_capture.records import TokenEntry, extract_token_fields, response_to_output_items

LOG_PROB_PLACEHOLDER_LIMIT: Final = -9999.0
"""vLLM clamps what it has no log probability for to -9999.0 in every OpenAI-shaped response."""

# Their particulars may quote what the engine sent. That is for the database, which only its owner reads.
_QUOTING_REASONS: Final = frozenset({reasons.CAPTURE_FAILED, reasons.INVALID_TOKENS, reasons.UNKNOWN_OUTCOME})

_logger = logging.getLogger(__name__)


@dataclass
class CaptureContext:
    """The call that the current request is, and where its record goes.

    A ``token_sink`` of None says that another process records this call: nothing is captured and
    nothing is marked. ``committed`` is set once the call's tokens are durable.
    """

    rollout_id: str
    model_call_id: str
    token_sink: TokenSink | None
    model: str = ""
    committed: bool = False


_current: ContextVar[CaptureContext | None] = ContextVar("token_id_capture_context", default=None)


def set_token_sink(context: CaptureContext | None) -> Token[CaptureContext | None]:
    """Make ``context`` the current one, in this task and those that it starts; None is no capture."""
    return _current.set(context)


def reset_token_sink(token: Token[CaptureContext | None]) -> None:
    """Undo the ``set_token_sink`` that returned ``token``."""
    _current.reset(token)


def current_capture_context() -> CaptureContext | None:
    """The context of the request that is being served; None outside a captured request."""
    return _current.get()


async def register_call_intent() -> None:
    """Announce the current call durably, before it is dispatched. Without a context: nothing.

    Raises:
        Exception: whatever ``begin_call`` of the sink raises. The call must not be dispatched then;
            no tokens were spent.
    """
    context, sink = _recording()
    if context is None or sink is None or missing_methods(sink, ("begin_call",)):
        return
    await cast(CallIntents, sink).begin_call(context.rollout_id, context.model_call_id)


async def capture_tokens(response: Mapping[str, Any]) -> None:
    """Record the tokens of a complete response (Responses or chat shape) before it is released.

    Call it before a conversion or a stream synthesis drops the arrays. Never raises an
    ``Exception``: no arrays, malformed arrays and a failed write mark the rollout with the reason.
    Without a context, or when the call is committed already: nothing.
    """
    context, sink = _recording()
    if context is None or sink is None or context.committed:
        return
    try:
        entry = _entry_from_response(context, response)
    except InvalidEntryError as error:
        await mark_current_call(reasons.INVALID_TOKENS, str(error))
    except ValidationError as error:
        await mark_current_call(reasons.INVALID_TOKENS, describe_validation(error))
    except Exception as error:
        _logger.exception("reading the tokens of %s failed", _named(context))
        await mark_current_call(reasons.CAPTURE_FAILED, f"{type(error).__name__}: {error}")
    else:
        if entry is None:
            await mark_current_call(reasons.NO_TOKEN_IDS, "no item of the response carries token arrays")
        else:
            await commit_choices([entry])


async def commit_entry(entry: TokenEntry) -> None:
    """Record an entry that the engine side built itself. Never raises an ``Exception``.

    Its rollout and call ids must be those of the context; else it is not written, and the rollout
    is marked. Without a context: nothing.
    """
    context, sink = _recording()
    if context is None or sink is None:
        return
    if (entry.rollout_id, entry.model_call_id) != (context.rollout_id, context.model_call_id):
        named = f"the entry names call {entry.model_call_id!r} of rollout {entry.rollout_id!r}"
        await mark_current_call(reasons.ID_MISMATCH, named)
        return
    await commit_choices([entry])


async def commit_choices(entries: Sequence[TokenEntry]) -> None:
    """Record the choices of the current call, the first under the call's own id; never raises.

    The first is written last, for its ``put`` ends the intent: a crash in between must leave the
    intent open.
    """
    context, sink = _recording()
    if context is None or sink is None:
        return
    for entry in entries:
        placeholder = _placeholder(entry)
        if placeholder is not None:
            await mark_current_call(reasons.LOG_PROB_PLACEHOLDER, placeholder)
            return
    for entry in (*entries[1:], *entries[:1]):
        if not await _put(context, sink, entry):
            return
    context.committed = True


async def mark_current_call(reason: str, detail: str = "") -> None:
    """Mark the current call's rollout incomplete, with one of ``reasons``. Never raises an ``Exception``."""
    context, sink = _recording()
    if context is None or sink is None:
        return
    text = f"{reason}: {detail}" if detail else reason
    _logger.warning("%s is not captured: %s", _named(context), reason if reason in _QUOTING_REASONS else text)
    try:
        await sink.mark_incomplete(context.rollout_id, context.model_call_id, text)
    except RolloutRetiredError:
        _logger.warning("%s came after its rollout was retired, so it was not marked", _named(context))
    except Exception:
        _logger.exception("marking %s failed; its open intent still masks the rollout", _named(context))


async def refuse_current_call(detail: str) -> None:
    """Close the current call's intent: the engine refused it and generated nothing. Never raises an ``Exception``."""
    context, sink = _recording()
    if context is None or sink is None or missing_methods(sink, ("refuse_call",)):
        return
    try:
        await cast(CallIntents, sink).refuse_call(context.rollout_id, context.model_call_id, detail)
    except (RolloutFrozenError, RolloutRetiredError) as late:
        _logger.warning("%s was refused by the engine too late to be recorded: %s", _named(context), late)
    except Exception:
        _logger.exception("closing the intent of %s failed, so it masks the rollout", _named(context))


def describe_validation(error: ValidationError) -> str:
    """The first problem of a validation error, on one line, with the field's name."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(map(str, first["loc"]))
    return f"{field}: {first['msg']}" if field else first["msg"]


def _recording() -> tuple[CaptureContext | None, TokenSink | None]:
    context = _current.get()
    return context, None if context is None else context.token_sink


def _entry_from_response(context: CaptureContext, response: Mapping[str, Any]) -> TokenEntry | None:
    fields = extract_token_fields(response)
    if fields is None:
        return None
    output_items, index = response_to_output_items(response)
    return TokenEntry(
        rollout_id=context.rollout_id,
        model_call_id=context.model_call_id,
        model=_text(response.get("model")) or context.model,
        response_id=_text(response.get("id")),
        finish_reason=_finish_reason(response, index),
        output_items=output_items,
        token_item_index=index,
        created_at=time(),
        **fields,
    )


def _finish_reason(response: Mapping[str, Any], index: int | None) -> str | None:
    choices = response.get("choices")
    choice = choices[index] if isinstance(choices, list) and index is not None and index < len(choices) else None
    return _text(choice.get("finish_reason")) if isinstance(choice, Mapping) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _placeholder(entry: TokenEntry) -> str | None:
    log_probs = entry.generation_log_probs
    lowest = min(log_probs, default=0.0)
    if lowest > LOG_PROB_PLACEHOLDER_LIMIT:
        return None
    return f"log probability {log_probs.index(lowest)} is {lowest}"


async def _put(context: CaptureContext, sink: TokenSink, entry: TokenEntry) -> bool:
    try:
        await sink.put(entry)
    except (RolloutFrozenError, RolloutRetiredError) as late:
        # No mark: it would raise the version of a snapshot that a consumer may have used already.
        _logger.warning("%s came too late: %s", _named(context), late)
    except ConflictingEntryError as conflict:
        _logger.warning("%s", conflict)  # the sink flagged it before it raised
    except Exception as error:
        _logger.exception("storing %s failed", _named(context))
        await mark_current_call(reasons.STORE_FAILED, f"{type(error).__name__}: {error}")
    else:
        return True
    return False


def _named(context: CaptureContext) -> str:
    return f"call {context.model_call_id!r} of rollout {context.rollout_id!r}"
