"""A sink that ends a span for each call that passes through it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from functools import lru_cache, partial
from importlib import import_module
from time import time_ns
from typing import Final, NamedTuple

from token_id_capture import reasons
from token_id_capture.errors import ConfigurationError
from token_id_capture.lifecycle import CallOrigin
from token_id_capture.protocols import TokenSink
from token_id_capture.provenance import HistoryLink
from token_id_capture.recent import Newest
from token_id_capture.records import TokenEntry, call_of_choice
from token_id_capture.server.http.metered import MeteredSink
from token_id_capture.server.http.metrics import GatewayMetrics
from token_id_capture.server.tracing.sending import Batching, Destination, Sender
from token_id_capture.server.tracing.spans import OPERATION, EndedCall, request, resource_head, trace_head

_MOST_OPEN: Final = 65_536
"""Calls whose start is remembered. A call that never ends, as its client hung up, has no span."""


class _Begun(NamedTuple):
    at: int  # nanoseconds
    agent: str | None
    trace: bytes


class TracedSink(MeteredSink):
    """A ``MeteredSink`` that also ends a span for each call. Close it to send the last ones.

    ``samples`` says whether the trace of an id is sampled; of one that is not, nothing is remembered.
    """

    def __init__(
        self, sink: TokenSink, metrics: GatewayMetrics, sender: Sender, samples: Callable[[int], bool]
    ) -> None:
        super().__init__(sink, metrics)
        self._sender = sender
        self._trace_of = lru_cache(maxsize=4096)(partial(_trace_of, samples))
        self._begun: Newest[str, _Begun] = Newest(_MOST_OPEN)
        self._sampled: dict[str, int] = {}  # tokens of a call's choices but the first, until that one is stored

    async def begin_attributed_call(self, rollout_id: str, model_call_id: str, origin: CallOrigin) -> None:
        """Remember when the call began."""
        trace = self._trace_of(rollout_id)
        if trace is not None:
            self._begun[model_call_id] = _Begun(time_ns(), origin.agent, trace)
        try:
            await super().begin_attributed_call(rollout_id, model_call_id, origin)
        except Exception as error:
            self._fail(model_call_id, type(error).__name__)
            raise

    async def refuse_call(self, rollout_id: str, model_call_id: str, detail: str = "") -> None:
        """End the span of a call that the engine refused."""
        await super().refuse_call(rollout_id, model_call_id, detail)
        self._fail(model_call_id, "refused")

    async def put(self, entry: TokenEntry, history: HistoryLink | None = None) -> None:
        """End the span once the call's first choice, which is written last, is durable."""
        call_id = call_of_choice(entry.model_call_id)
        try:
            await super().put(entry, history)
        except Exception as error:
            self._fail(call_id, type(error).__name__)
            raise
        if call_id not in self._begun:
            return
        tokens = len(entry.generation_token_ids) + self._sampled.pop(call_id, 0)
        if call_id == entry.model_call_id:
            self._end(call_id, entry, tokens)
        else:
            self._sampled[call_id] = tokens

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "", reason: str = "") -> None:
        """End the span of a call that is flagged, with the reason as its error."""
        try:
            await super().mark_incomplete(rollout_id, model_call_id, reason)
        finally:
            self._fail(model_call_id, reasons.split_reason(reason)[0])

    async def close(self) -> None:
        """Close the sink, and send the spans that wait."""
        await super().close()
        await asyncio.to_thread(self._sender.close)

    def _end(self, call_id: str, entry: TokenEntry, tokens: int) -> None:
        begun = self._begun.pop(call_id)
        call = EndedCall(
            begun.trace,
            call_id,
            begun.at,
            time_ns(),
            begun.agent,
            "",
            len(entry.prompt_token_ids),
            tokens,
            entry.model,
            entry.response_id,
            entry.upstream,
            entry.finish_reason,
        )
        self._sender.add(call)

    def _fail(self, call_id: str, error: str) -> None:
        self._sampled.pop(call_id, None)
        begun = self._begun.pop(call_id, None)
        if begun is not None:
            self._sender.add(EndedCall(begun.trace, call_id, begun.at, time_ns(), begun.agent, error))


def traced(sink: TokenSink, metrics: GatewayMetrics) -> TracedSink:
    """A sink whose spans go out by OTLP over HTTP, as the variables of OpenTelemetry (``OTEL_...``) say.

    Raises:
        ConfigurationError: OpenTelemetry is not installed, or a variable is not usable.
    """
    require_traces()
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import Decision

    named = Resource.create({"service.name": "tokcap"}).merge(OTELResourceDetector().detect())
    sampler = TracerProvider(resource=named, shutdown_on_exit=False).sampler

    def samples(trace_id: int) -> bool:
        return sampler.should_sample(None, trace_id, OPERATION).decision is not Decision.DROP

    write = partial(request, resource_head(named.attributes))
    sender = Sender(Destination.from_environment(), Batching.from_environment(), write)
    return TracedSink(sink, metrics, sender, samples)


def require_traces() -> None:
    """Raise a ``ConfigurationError`` that says what to install, if it is not."""
    try:
        import_module("opentelemetry.sdk")
    except ImportError as error:
        raise ConfigurationError("--traces needs pip install 'token-id-capture[traces]'") from error


def _trace_of(samples: Callable[[int], bool], rollout_id: str) -> bytes | None:
    """What the spans of a rollout share; None if it is not sampled.

    The trace's id is made from the rollout's, so that every process finds the same.
    """
    digest = hashlib.sha256(rollout_id.encode()).digest()
    if not samples(int.from_bytes(digest[:16])):
        return None
    return trace_head(digest[:16], digest[16:24], rollout_id)
