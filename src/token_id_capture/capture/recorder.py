"""One call's way into a sink: ``begin`` it before the engine is asked, then ``commit``, ``flag`` or ``refuse`` it.

From ``begin`` on nothing that goes wrong here reaches the model call: the rollout is flagged incomplete and
the failure is logged. If even the flag fails, the intent is still open, and an open intent makes the
snapshot incomplete. A cancelled call is the same: nothing is written, and its open intent tells of the loss.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from time import time
from typing import Any, Final, cast

from pydantic import BaseModel, ValidationError

from token_id_capture import reasons
from token_id_capture.capture.context import CaptureContext
from token_id_capture.errors import (
    ConflictingEntryError,
    InvalidEntryError,
    RolloutFrozenError,
    RolloutRetiredError,
)
from token_id_capture.lifecycle import UNTOLD
from token_id_capture.protocols import (
    AttributedCalls,
    BeginsCalls,
    CallIntents,
    RemembersHistories,
    TokenSink,
    mark_of,
    offers,
)
from token_id_capture.provenance import HistoryLink
from token_id_capture.records import TokenEntry, extract_token_fields, response_to_output_items

SCOPE_KEY: Final = "token_id_capture.call"
"""Where ``TokenCaptureMiddleware`` puts the recorder of a request into its ASGI scope."""

LOG_PROB_PLACEHOLDER_LIMIT: Final = -9999.0
"""vLLM clamps what it has no log probability for to -9999.0 in every OpenAI-shaped response."""

HIGHEST_LOG_PROB: Final = 1e-3
"""A probability is at most 1; what rounding in half precision adds to its logarithm is allowed."""

# Their particulars may quote what the engine sent. That is for the database, which only its owner reads.
_QUOTING_REASONS: Final = frozenset({reasons.CAPTURE_FAILED, reasons.INVALID_TOKENS, reasons.UNKNOWN_OUTCOME})

_logger = logging.getLogger(__name__)


class CallRecorder:
    """Records the call of ``context`` in its sink; without a sink every method does nothing."""

    def __init__(self, context: CaptureContext) -> None:
        self.context = context

    async def begin(self) -> None:
        """Record durably that the call is about to be dispatched.

        Raises:
            Exception: whatever ``begin_call`` of the sink raises. The call must not be dispatched then;
                no tokens were spent.
        """
        context, sink = self.context, self.context.token_sink
        if sink is None:
            return
        mark_of(sink)  # a sink that cannot be told of a loss gets no call
        if context.origin != UNTOLD and offers(sink, AttributedCalls):
            await sink.begin_attributed_call(context.rollout_id, context.model_call_id, context.origin)
        elif offers(sink, BeginsCalls):
            await sink.begin_call(context.rollout_id, context.model_call_id)

    async def capture(self, response: Mapping[str, Any] | BaseModel) -> None:
        """Commit the tokens of a complete response (Responses or chat shape), or flag why there are none.

        Does nothing once the call is committed. Never raises an ``Exception``.
        """
        if self.context.token_sink is None or self.context.committed:
            return
        try:
            entry = _entry_from_response(self.context, _as_mapping(response))
        except InvalidEntryError as error:
            await self.flag(reasons.INVALID_TOKENS, str(error))
        except ValidationError as error:
            await self.flag(reasons.INVALID_TOKENS, describe_validation(error))
        except Exception as error:
            _logger.exception("reading the tokens of %s failed", self.context)
            await self.flag(reasons.CAPTURE_FAILED, f"{type(error).__name__}: {error}")
        else:
            if entry is None:
                await self.flag(reasons.NO_TOKEN_IDS, "no item of the response carries token arrays")
            else:
                await self.commit([entry])

    async def commit(self, entries: Sequence[TokenEntry], histories: Sequence[HistoryLink | None] = ()) -> None:
        """Store the choices of the call, the first under the call's own id. Never raises an ``Exception``.

        ``histories`` has for each of them by what a later request is recognised as its continuation.
        The first is written last, as its ``put`` ends the intent: a crash in between must leave the
        intent open.
        """
        sink = self.context.token_sink
        if sink is None:
            return
        for entry in entries:
            if (unusable := _unusable(entry)) is not None:
                await self.flag(*unusable)
                return
        stored = list(itertools.zip_longest(entries, histories))
        for entry, history in (*stored[1:], *stored[:1]):
            if not await self._put(sink, entry, history):
                return
        self.context.committed = True

    async def flag(self, reason: str, detail: str = "") -> None:
        """Flag the rollout incomplete with one of ``reasons``. Never raises an ``Exception``."""
        context, sink = self.context, self.context.token_sink
        if sink is None:
            return
        text = f"{reason}: {detail}" if detail else reason
        _logger.warning("%s is not captured: %s", context, reason if reason in _QUOTING_REASONS else text)
        try:
            await mark_of(sink)(context.rollout_id, context.model_call_id, text)
        except RolloutRetiredError:
            _logger.warning("%s came after its rollout was retired, so it was not marked", context)
        except Exception:
            _logger.exception("marking %s failed; its open intent still masks the rollout", context)

    async def refuse(self, detail: str) -> None:
        """Close the intent: the engine refused the call and generated nothing. Never raises an ``Exception``."""
        context, sink = self.context, self.context.token_sink
        if sink is None or not offers(sink, CallIntents):
            return
        try:
            await sink.refuse_call(context.rollout_id, context.model_call_id, detail)
        except (RolloutFrozenError, RolloutRetiredError) as late:
            _logger.warning("%s was refused by the engine too late to be recorded: %s", context, late)
        except Exception:
            _logger.exception("closing the intent of %s failed, so it masks the rollout", context)

    async def _put(self, sink: TokenSink, entry: TokenEntry, history: HistoryLink | None) -> bool:
        try:
            if history is None:
                await sink.put(entry)
            else:
                await cast(RemembersHistories, sink).put(entry, history)
        except (RolloutFrozenError, RolloutRetiredError) as late:
            # No flag: it would raise the version of a snapshot that a consumer may have used already.
            _logger.warning("%s came too late: %s", self.context, late)
        except ConflictingEntryError as conflict:
            _logger.warning("%s", conflict)  # the sink flagged it before it raised
        except Exception as error:
            _logger.exception("storing %s failed", self.context)
            await self.flag(reasons.STORE_FAILED, f"{type(error).__name__}: {error}")
        else:
            return True
        return False


def recorder_in(scope: Mapping[str, Any]) -> CallRecorder | None:
    """The recorder of the request with this ASGI scope; None if its tokens are not captured."""
    found = scope.get(SCOPE_KEY)
    return found if isinstance(found, CallRecorder) else None


def describe_validation(error: ValidationError) -> str:
    """The first problem of a validation error, on one line, with the field's name."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(map(str, first["loc"]))
    return f"{field}: {first['msg']}" if field else first["msg"]


def _as_mapping(response: Mapping[str, Any] | BaseModel) -> Mapping[str, Any]:
    return response.model_dump() if isinstance(response, BaseModel) else response


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


def _unusable(entry: TokenEntry) -> tuple[str, str] | None:
    """The reason, and the particulars, why the log probabilities are none to train on."""
    log_probs = entry.generation_log_probs.tolist() or [0.0]
    lowest, highest = min(log_probs), max(log_probs)
    if lowest <= LOG_PROB_PLACEHOLDER_LIMIT:
        return reasons.LOG_PROB_PLACEHOLDER, f"log probability {log_probs.index(lowest)} is {lowest}"
    if highest > HIGHEST_LOG_PROB:
        return reasons.INVALID_TOKENS, f"log probability {log_probs.index(highest)} is {highest}, above 0"
    return None
