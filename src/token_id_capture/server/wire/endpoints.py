"""What a request can do, by its method and path."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

from token_id_capture.server.engines.base import OPENAI_PATHS, Endpoint

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "DELETE"})
# The last step of paths that take a POST and generate nothing.
_HARMLESS_STEPS = frozenset(
    {
        # questions about text
        "apply-template",
        "classify",
        "countTokens",
        "count_tokens",
        "derender",
        "detokenize",
        "embedding",
        "embeddings",
        "encode",
        "input_tokens",
        "parse_function_call",
        "pooling",
        "render",
        "rerank",
        "reranking",
        "score",
        "separate_reasoning",
        "tokenize",
        # what vLLM 0.32 is told
        "abort_requests",
        "cancel",
        "finish_weight_update",
        "init_weight_transfer_engine",
        "is_paused",
        "is_scaling_elastic_ep",
        "is_sleeping",
        "load_lora_adapter",
        "pause",
        "ping",
        "reset_encoder_cache",
        "reset_mm_cache",
        "reset_prefix_cache",
        "resume",
        "scale_elastic_ep",
        "sleep",
        "start_profile",
        "start_weight_update",
        "stop_profile",
        "unload_lora_adapter",
        "update_weights",
        "wake_up",
        # what SGLang 0.5 is told
        "abort_request",
        "clear_hicache_storage_backend",
        "close_session",
        "configure_logging",
        "continue_generation",
        "destroy_weights_update_group",
        "dump_expert_distribution_record",
        "flush_cache",
        "freeze_gc",
        "get_weights_by_name",
        "init_weights_update_group",
        "open_session",
        "pause_generation",
        "release_memory_occupation",
        "resume_memory_occupation",
        "start_expert_distribution_record",
        "stop_expert_distribution_record",
        "update_weight_version",
        "update_weights_from_disk",
        "update_weights_from_distributed",
        "update_weights_from_ipc",
        "update_weights_from_tensor",
        # what llama-server is told
        "load",
        "lora-adapters",
        "props",
        "unload",
    }
)
# Of Gemini's interface, behind the model's name and a colon.
_HARMLESS_VERBS = frozenset({"batchEmbedContents", "countTokens", "embedContent"})
# What another server may read as the end of the path, or as a way to another one.
_AMBIGUOUS = re.compile(r"[#?;\\]|/\.{1,2}(/|$)")


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
    step = path.rpartition("/")[2]
    harmless = step in _HARMLESS_STEPS or step.rpartition(":")[2] in _HARMLESS_VERBS
    return Kind.HARMLESS if harmless and not _AMBIGUOUS.search(path) else Kind.UNCAPTURED


def _last_step(path: str) -> str:
    """The last step of a path, or what follows its colon, as in ``models/M:countTokens``."""
    return path.rpartition("/")[2].rpartition(":")[2]


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
