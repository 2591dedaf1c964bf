"""OpenTelemetry spans of captured calls: from the intent until the tokens are durable, or the reason why not.

Names follow the semantic conventions for generative AI (opentelemetry.io/docs/specs/semconv/gen-ai). A rollout is
the conversation, and all its calls are of one trace, whichever process served them. Spans hold no prompt, no answer
and no header.

A finished span is handed to the SDK's processor as it is, past the tracer, whose bookkeeping for spans that are open
costs as much as everything else here.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from functools import lru_cache
from importlib import import_module
from time import time_ns
from typing import TYPE_CHECKING, Final, NamedTuple

from token_id_capture import reasons
from token_id_capture.errors import ConfigurationError
from token_id_capture.lifecycle import CallOrigin
from token_id_capture.protocols import TokenSink
from token_id_capture.provenance import HistoryLink
from token_id_capture.recent import Newest
from token_id_capture.records import TokenEntry, call_of_choice
from token_id_capture.server.http.metered import MeteredSink
from token_id_capture.server.http.metrics import GatewayMetrics

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.trace import SpanContext

_Attributes = dict[str, str | int | tuple[str, ...]]

_MOST_OPEN: Final = 65_536
"""Calls whose start is remembered. A call that never ends, as its client hung up, has no span."""

_NAME: Final = "chat"


class _Begun(NamedTuple):
    at: int  # nanoseconds
    agent: str | None


class TracedSink(MeteredSink):
    """A ``MeteredSink`` that also ends a span for each call. Close it to send the last ones."""

    def __init__(
        self, sink: TokenSink, metrics: GatewayMetrics, provider: TracerProvider, processor: SpanProcessor
    ) -> None:
        super().__init__(sink, metrics)
        self._provider = provider
        self._processor = processor
        self._begun: Newest[str, _Begun] = Newest(_MOST_OPEN)
        self._sampled: Counter[str] = Counter()  # tokens of a call's choices but the first, until that one is stored

    async def begin_attributed_call(self, rollout_id: str, model_call_id: str, origin: CallOrigin) -> None:
        """Remember when the call began."""
        self._begun[model_call_id] = _Begun(time_ns(), origin.agent)
        try:
            await super().begin_attributed_call(rollout_id, model_call_id, origin)
        except Exception as error:
            self._end(rollout_id, model_call_id, type(error).__name__)
            raise

    async def refuse_call(self, rollout_id: str, model_call_id: str, detail: str = "") -> None:
        """End the span of a call that the engine refused."""
        await super().refuse_call(rollout_id, model_call_id, detail)
        self._end(rollout_id, model_call_id, "refused")

    async def put(self, entry: TokenEntry, history: HistoryLink | None = None) -> None:
        """End the span once the call's first choice, which is written last, is durable."""
        call_id = call_of_choice(entry.model_call_id)
        try:
            await super().put(entry, history)
        except Exception as error:
            self._end(entry.rollout_id, call_id, type(error).__name__)
            raise
        self._sampled[call_id] += len(entry.generation_token_ids)
        if call_id == entry.model_call_id:
            self._end(entry.rollout_id, call_id, "", _described(entry, self._sampled[call_id]))

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "", reason: str = "") -> None:
        """End the span of a call that is flagged, with the reason as its error."""
        try:
            await super().mark_incomplete(rollout_id, model_call_id, reason)
        finally:
            self._end(rollout_id, model_call_id, reasons.split_reason(reason)[0])

    async def close(self) -> None:
        """Close the sink, and send the spans that wait."""
        await super().close()
        await asyncio.to_thread(self._processor.shutdown)

    def _end(self, rollout_id: str, model_call_id: str, error: str, described: _Attributes | None = None) -> None:
        self._sampled.pop(model_call_id, None)
        begun = self._begun.pop(model_call_id, None)
        if begun is None:
            return
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.trace.sampling import Decision
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode

        parent = _trace_of(rollout_id)
        if self._provider.sampler.should_sample(None, parent.trace_id, _NAME).decision is Decision.DROP:
            return
        attributes: _Attributes = {
            "gen_ai.operation.name": _NAME,
            "gen_ai.conversation.id": rollout_id,
            "tokcap.model_call_id": model_call_id,
            **(described or {}),
        }
        if begun.agent is not None:
            attributes["gen_ai.agent.name"] = begun.agent
        if error:
            attributes["error.type"] = error
        span = ReadableSpan(
            f"{_NAME} {attributes.get('gen_ai.request.model', '')}".strip(),
            SpanContext(parent.trace_id, random.getrandbits(64), is_remote=False, trace_flags=parent.trace_flags),
            parent,
            self._provider.resource,
            attributes,
            kind=SpanKind.CLIENT,
            status=Status(StatusCode.ERROR, error) if error else Status(),
            start_time=begun.at,
            end_time=time_ns(),
            instrumentation_scope=InstrumentationScope("token_id_capture"),
        )
        self._processor.on_end(span)


def traced(sink: TokenSink, metrics: GatewayMetrics) -> TracedSink:
    """A sink whose spans go out by OTLP over HTTP, as the variables of OpenTelemetry (``OTEL_...``) say.

    Raises:
        ConfigurationError: OpenTelemetry is not installed.
    """
    require_traces()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = Resource.create({"service.name": "tokcap"}).merge(OTELResourceDetector().detect())
    return TracedSink(sink, metrics, TracerProvider(resource=named), BatchSpanProcessor(OTLPSpanExporter()))


def require_traces() -> None:
    """Raise a ``ConfigurationError`` that says what to install, if it is not."""
    try:
        import_module("opentelemetry.exporter.otlp.proto.http")
        import_module("opentelemetry.sdk")
    except ImportError as error:
        raise ConfigurationError("--traces needs pip install 'token-id-capture[traces]'") from error


@lru_cache(maxsize=4096)
def _trace_of(rollout_id: str) -> SpanContext:
    """The trace of a rollout; its id is made from the rollout's, so that every process finds the same."""
    from opentelemetry.trace import SpanContext, TraceFlags

    digest = hashlib.sha256(rollout_id.encode()).digest()
    trace, span = int.from_bytes(digest[:16]), int.from_bytes(digest[16:24])
    return SpanContext(trace, span, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _described(entry: TokenEntry, sampled: int) -> _Attributes:
    found: _Attributes = {
        "gen_ai.usage.input_tokens": len(entry.prompt_token_ids),
        "gen_ai.usage.output_tokens": sampled,
    }
    if entry.model:
        found["gen_ai.request.model"] = found["gen_ai.response.model"] = entry.model
    if entry.response_id is not None:
        found["gen_ai.response.id"] = entry.response_id
    if entry.upstream is not None:
        found["server.address"] = entry.upstream
    if entry.finish_reason is not None:
        found["gen_ai.response.finish_reasons"] = (entry.finish_reason,)
    return found
