"""A sink that counts what passes through it, and times the writes."""

from __future__ import annotations

from typing import cast

from token_id_capture import reasons
from token_id_capture.errors import ConflictingEntryError, RolloutFrozenError, RolloutRetiredError
from token_id_capture.lifecycle import UNTOLD, CallOrigin
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
from token_id_capture.records import TokenEntry, call_of_choice
from token_id_capture.server.http.metrics import GatewayMetrics
from token_id_capture.server.wire.entries import is_all_zero


class MeteredSink:
    """Passes everything to ``sink`` and back, and counts each call once, by what became of it."""

    def __init__(self, sink: TokenSink, metrics: GatewayMetrics) -> None:
        self._sink = sink
        self._mark = mark_of(sink)
        self._metrics = metrics

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """Count the call as begun, or as not sent."""
        await self.begin_attributed_call(rollout_id, model_call_id, UNTOLD)

    async def begin_attributed_call(self, rollout_id: str, model_call_id: str, origin: CallOrigin) -> None:
        """The same, where it is known whose call it is."""
        try:
            if origin != UNTOLD and offers(self._sink, AttributedCalls):
                await self._sink.begin_attributed_call(rollout_id, model_call_id, origin)
            elif offers(self._sink, BeginsCalls):
                await self._sink.begin_call(rollout_id, model_call_id)
        except (RolloutFrozenError, RolloutRetiredError):
            self._metrics.count("closed")
            raise
        except Exception:
            self._metrics.count("unavailable")
            raise
        self._metrics.begun.inc()

    async def refuse_call(self, rollout_id: str, model_call_id: str, detail: str = "") -> None:
        """Count the call as refused."""
        self._metrics.count("refused")
        if offers(self._sink, CallIntents):
            await self._sink.refuse_call(rollout_id, model_call_id, detail)

    async def put(self, entry: TokenEntry, history: HistoryLink | None = None) -> None:
        """Time the write, and count the call as captured or late.

        Of a call with several choices the entry that has the call's own id is written last.
        """
        try:
            with self._metrics.put_seconds.time():
                if history is None:
                    await self._sink.put(entry)
                else:
                    await cast(RemembersHistories, self._sink).put(entry, history)
        except (RolloutFrozenError, RolloutRetiredError):
            self._metrics.count("late")
            raise
        except ConflictingEntryError:
            self._metrics.count("marked", reasons.CONFLICTING_PAYLOAD)
            raise
        if is_all_zero(entry.generation_log_probs):
            self._metrics.zero_log_probs.inc()
        if call_of_choice(entry.model_call_id) == entry.model_call_id:
            self._metrics.count("captured")

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "", reason: str = "") -> None:
        """Count the call under the reason of its mark, also where the mark fails."""
        code, _ = reasons.split_reason(reason)
        try:
            await self._mark(rollout_id, model_call_id, reason)
        except RolloutRetiredError:
            self._metrics.count("late")
            raise
        except Exception:
            self._count_mark(code)
            raise
        self._count_mark(code)

    async def close(self) -> None:
        """Close the sink."""
        await self._sink.close()

    def _count_mark(self, reason: str) -> None:
        if reason == reasons.UNCAPTURED_ENDPOINT:
            self._metrics.count("uncaptured")
        else:
            self._metrics.count("marked", reason or reasons.UNSPECIFIED)
