"""What to change where an engine's tokens are not captured."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

# Engine (or any), a part of the mode, the reason, a pattern of the particulars: the first that fits is told.
_RULES: Final[Iterable[tuple[str, str, str, str, str]]] = (
    ("", "", "", "HTTP 401", "give the engine's key: --upstream-api-key-file"),
    ("", "", "", "HTTP 403", "give the engine's key: --upstream-api-key-file"),
    (
        "",
        "tools",
        "",
        "tool-call-parser",
        "for tool calls start the engine with its tool-call parser (vLLM: --enable-auto-tool-choice "
        "--tool-call-parser NAME)",
    ),
    ("", "", "", "HTTP 404", "nothing: the engine does not serve this"),
    ("", "", "uncaptured_endpoint", "^HTTP 3", "give the address that it redirects to as --upstream"),
    (
        "llama-cpp",
        "",
        "no_token_ids",
        "has no prompt token ids$",
        "allow two more requests a call to its tokenizer: --tokenize-prompts",
    ),
    (
        "llama-cpp",
        "",
        "no_token_ids",
        "",
        "upgrade llama-server to a build whose logprobs.content entries have an id",
    ),
    (
        "sglang",
        "streamed",
        "no_token_ids",
        "",
        "upgrade SGLang to 0.5.23, or let the gateway make the streams: --streaming never",
    ),
    ("sglang", "", "no_token_ids", "no token ids", "upgrade SGLang to 0.5.23: older builds send no token ids"),
    ("message", "", "no_token_ids", "", "this server puts no token arrays on its messages: try --engine auto"),
    (
        "",
        "streamed",
        "no_token_ids",
        "has no prompt token ids$",
        "a proxy in between drops them in streams: --streaming never",
    ),
    (
        "vllm",
        "",
        "no_token_ids",
        "no token ids",
        "upgrade vLLM to 0.10.2 or later: return_token_ids is unknown before",
    ),
    (
        "",
        "",
        "no_token_ids",
        "no log probabilities",
        "allow log probabilities in the engine: it sent none with logprobs: true",
    ),
    (
        "",
        "",
        "no_token_ids",
        "",
        "serve the model with an engine that returns token ids (vLLM, SGLang, llama-server), or name the strategy: "
        "--engine",
    ),
    (
        "",
        "streamed",
        "token_count_mismatch",
        "",
        "upgrade the engine (vLLM's tool parsers lost ids in streams before December 2025), or --streaming never",
    ),
    ("", "", "log_prob_placeholder", "", "the engine sent no real log probability for a sampled token: upgrade it"),
)


def advice(engine: str, mode: str, reason: str, detail: str) -> str:
    """One piece of advice, or nothing where there is none to give.

    ``reason`` is one of ``reasons``, empty for a call that the engine refused; ``detail`` its particulars.
    """
    for of_engine, in_mode, of_reason, in_detail, text in _RULES:
        applies = of_engine in ("", engine) and in_mode in mode and re.search(in_detail, detail)
        if applies and of_reason == reason:
            return text
    return ""
