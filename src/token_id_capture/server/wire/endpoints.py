"""What a request can do, by its method and path."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

from token_id_capture.server.engines.base import OPENAI_PATHS, Endpoint

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "DELETE"})
# The last step of paths that take a POST and generate nothing, in vLLM 0.32, SGLang 0.5 and llama-server.
_HARMLESS_STEPS = frozenset(
    {
        "abort_request",
        "apply-template",
        "cancel",
        "classify",
        "count_tokens",
        "derender",
        "detokenize",
        "embedding",
        "embeddings",
        "flush_cache",
        "input_tokens",
        "load_lora_adapter",
        "pause",
        "pooling",
        "rerank",
        "reranking",
        "reset_prefix_cache",
        "render",
        "resume",
        "score",
        "sleep",
        "tokenize",
        "unload_lora_adapter",
        "update_weight_version",
        "wake_up",
    }
)


class Kind(Enum):
    """What the gateway does with a request of a captured rollout."""

    CAPTURED = "captured"
    """A generation whose tokens are captured."""
    HARMLESS = "harmless"
    """It generates nothing: passed on, and nothing is recorded."""
    UNCAPTURED = "uncaptured"
    """It could generate, and its tokens are not captured: passed on, and the rollout is marked."""


def kind_of(method: str, path: str, captured: Collection[str] = OPENAI_PATHS) -> Kind:
    """Sort a request; ``captured`` are the paths of the engine. What is not known to be harmless is taken for
    a generation."""
    if method in _SAFE_METHODS:
        return Kind.HARMLESS
    if method == "POST" and path in captured:
        return Kind.CAPTURED
    return Kind.HARMLESS if path.rpartition("/")[2] in _HARMLESS_STEPS else Kind.UNCAPTURED


def expected_choices(endpoint: Endpoint, body: Mapping[str, Any]) -> int:
    """How many choices the response will have: ``n``, for each prompt where there are several."""
    prompts = body.get("prompt") if endpoint is Endpoint.COMPLETIONS else None
    n = body.get("n")
    if endpoint is Endpoint.GENERATE:
        sampling = body.get("sampling_params")
        n = sampling.get("n") if isinstance(sampling, Mapping) else None
        prompts = body.get("text") or body.get("input_ids")
    choices = n if type(n) is int and n > 0 else 1
    # A list of integers is one prompt of token ids.
    if isinstance(prompts, list) and prompts and type(prompts[0]) is not int:
        return choices * len(prompts)
    return choices
