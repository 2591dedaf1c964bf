"""OpenTelemetry spans of captured calls: from the intent until the tokens are durable, or the reason why not.

::

    sink      notes when a call began, and at its end appends a tuple      in the event loop
    sending   takes what waits, every few seconds                          in a thread of its own
    spans     writes it as OTLP, which is sent in one request

Names follow the semantic conventions for generative AI (opentelemetry.io/docs/specs/semconv/gen-ai). A rollout is
the conversation, and all its calls are of one trace, whichever process served them. Spans hold no prompt, no answer
and no header.

OpenTelemetry's SDK decides which traces are sampled and describes the process. Its spans and its exporter are not
used: to fill protobuf's objects takes several times as long as everything here.
"""

from __future__ import annotations

from token_id_capture.server.tracing.sink import require_traces, traced

__all__ = ["require_traces", "traced"]
