"""The one place that knows NVIDIA NeMo Gym: its build dict, and what an unmodified Gym is configured with.

``nemo_gym`` itself is imported only by what Gym calls. The names below load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from token_id_capture.integrations.nemo_gym.builds import (
    MASK_SAMPLE_KEY,
    SNAPSHOT_KEY,
    TOKEN_CAPTURE_KEY,
    BuildDict,
    Projection,
    apply_build,
    build_dict,
    model_of,
    rollout_carries_token_ids,
    scored_answer,
    sequence_dict,
    snapshot_of_build,
)

if TYPE_CHECKING:
    from token_id_capture.integrations.nemo_gym.endpoints import CaptureSink, CaptureSource, LineageStore
    from token_id_capture.integrations.nemo_gym.responses import (
        response_to_output_items,
        strip_token_fields,
        usage,
    )
    from token_id_capture.integrations.nemo_gym.synchronous import TokenCaptureStore, make_token_store

__all__ = [
    "MASK_SAMPLE_KEY",
    "SNAPSHOT_KEY",
    "TOKEN_CAPTURE_KEY",
    "BuildDict",
    "CaptureSink",
    "CaptureSource",
    "LineageStore",
    "Projection",
    "TokenCaptureStore",
    "apply_build",
    "build_dict",
    "make_token_store",
    "model_of",
    "response_to_output_items",
    "rollout_carries_token_ids",
    "scored_answer",
    "sequence_dict",
    "snapshot_of_build",
    "strip_token_fields",
    "usage",
]

_LAZY: Final = {
    "CaptureSink": "endpoints",
    "CaptureSource": "endpoints",
    "LineageStore": "endpoints",
    "TokenCaptureStore": "synchronous",
    "make_token_store": "synchronous",
    "response_to_output_items": "responses",
    "strip_token_fields": "responses",
    "usage": "responses",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    return value
