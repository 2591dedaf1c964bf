"""What a request can do, by its method and path."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

from token_id_capture.server.engines.base import Endpoint

CAPTURED: Final[dict[str, Endpoint]] = {
    "/v1/chat/completions": Endpoint.CHAT,
    "/chat/completions": Endpoint.CHAT,
    "/v1/completions": Endpoint.COMPLETIONS,
    "/completions": Endpoint.COMPLETIONS,
}

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "DELETE"})
# The last step of paths that take a POST and generate nothing, in vLLM 0.32, SGLang 0.5 and llama-server.
_HARMLESS_STEPS = frozenset(
    {
        "abort_request",
        "apply-template",
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


def kind_of(method: str, path: str) -> Kind:
    """Sort a request. What is not known to be harmless is taken for a generation."""
    if method in _SAFE_METHODS:
        return Kind.HARMLESS
    if method == "POST" and path in CAPTURED:
        return Kind.CAPTURED
    return Kind.HARMLESS if path.rpartition("/")[2] in _HARMLESS_STEPS else Kind.UNCAPTURED


def expected_choices(endpoint: Endpoint, body: Mapping[str, Any]) -> int:
    """How many choices the reply will have: ``n``, for each prompt where there are several."""
    n = body.get("n")
    choices = n if type(n) is int and n > 0 else 1
    prompts = body.get("prompt")
    if endpoint is Endpoint.COMPLETIONS and isinstance(prompts, list) and prompts:
        # A list of integers is one prompt of token ids.
        return choices if type(prompts[0]) is int else choices * len(prompts)
    return choices
