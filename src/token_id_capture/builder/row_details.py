"""What a row tells of its tokens beside the arrays: where answers lie, how and by what they were sampled. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from token_id_capture.builder.sequences import Sequence
    from token_id_capture.records import TokenEntry

TRUNCATED = "length"


def details(sequence: Sequence | None) -> dict[str, Any]:
    """Plain fields of ``TrainingRow``; without a sequence all of them are empty."""
    calls = [] if sequence is None else sequence.calls
    last = calls[-1] if calls else None
    modes = {call.log_probs_mode for call in calls}
    return {
        "finish_reason": last.finish_reason if last else None,
        "truncated": last is not None and last.finish_reason == TRUNCATED,
        "prompt_length": len(calls[0].prompt_token_ids) if calls else 0,
        "turn_spans": [_turn(call) for call in calls],
        "sampling": last.sampling if last else None,
        "log_probs_mode": modes.pop() if len(modes) == 1 else None,
        "weight_versions": [span for call in calls for span in _weights(call)],
    }


def _turn(call: TokenEntry) -> dict[str, Any]:
    start = len(call.prompt_token_ids)
    return {
        "start": start,
        "end": start + len(call.generation_token_ids),
        "model_call_id": call.model_call_id,
        "response_id": call.response_id,
        "model": call.model,
    }


def _weights(call: TokenEntry) -> Iterator[dict[str, Any]]:
    """Spans of one weight version each, in tokens of the sequence; none where the engine does not tell."""
    start, length = len(call.prompt_token_ids), len(call.generation_token_ids)
    told = (call.model_extra or {}).get("weight_versions")
    if call.weight_version is not None:
        yield {"start": start, "end": start + length, "version": call.weight_version}
    elif isinstance(told, list):
        # vLLM counts them in tokens of the generation, the end exclusive.
        for span in told:
            if isinstance(span, Mapping) and isinstance(span.get("start"), int) and isinstance(span.get("end"), int):
                first, end = max(0, span["start"]), min(length, span["end"])
                if first < end:
                    yield {"start": start + first, "end": start + end, "version": str(span.get("version"))}
