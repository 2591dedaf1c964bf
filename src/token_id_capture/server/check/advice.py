"""What to change where an engine's tokens are not captured."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from token_id_capture import reasons


@dataclass(frozen=True)
class _Rule:
    """One piece of advice, and for what it is; what is empty fits all.

    ``mode`` is a part of the mode's name, ``detail`` a pattern of the particulars.
    """

    text: str
    engine: str = ""
    mode: str = ""
    reason: str = ""
    detail: str = ""

    def fits(self, engine: str, mode: str, reason: str, detail: str) -> bool:
        of_engine = self.engine in ("", engine) and self.mode in mode
        return of_engine and self.reason == reason and re.search(self.detail, detail) is not None


_NO_PROMPT: Final = "has no prompt token ids$"

# The first that fits is told. A call that the engine refused has no reason.
_RULES: Final = (
    _Rule("give the engine's key: --upstream-api-key-file", detail="HTTP 40[13]"),
    _Rule(
        "for tool calls start the engine with its tool-call parser (vLLM: --enable-auto-tool-choice "
        "--tool-call-parser NAME)",
        mode="tools",
        detail="tool-call-parser",
    ),
    _Rule("nothing to change: the engine does not serve this", detail="HTTP 404"),
    _Rule("give the address that it redirects to as --upstream", reason=reasons.UNCAPTURED_ENDPOINT, detail="^HTTP 3"),
    _Rule(
        "have the engine, or the proxy in between, not compress responses",
        reason=reasons.INVALID_TOKENS,
        detail="is compressed",
    ),
    _Rule(
        "allow two more requests a call to its tokenizer: --tokenize-prompts",
        engine="llama-cpp",
        reason=reasons.NO_TOKEN_IDS,
        detail=_NO_PROMPT,
    ),
    _Rule(
        "upgrade llama-server to a build whose logprobs.content entries have an id",
        engine="llama-cpp",
        reason=reasons.NO_TOKEN_IDS,
    ),
    _Rule(
        "upgrade SGLang to 0.5.23, or let the gateway make the streams: --streaming never",
        engine="sglang",
        mode="streamed",
        reason=reasons.NO_TOKEN_IDS,
    ),
    _Rule(
        "upgrade SGLang to 0.5.23: older builds send no token ids",
        engine="sglang",
        reason=reasons.NO_TOKEN_IDS,
        detail="no token ids",
    ),
    _Rule(
        "this server puts no token arrays on its messages: try --engine auto",
        engine="message",
        reason=reasons.NO_TOKEN_IDS,
    ),
    _Rule(
        "a proxy in between drops them in streams: --streaming never",
        mode="streamed",
        reason=reasons.NO_TOKEN_IDS,
        detail=_NO_PROMPT,
    ),
    _Rule(
        "upgrade vLLM to 0.10.2 or later: return_token_ids is unknown before",
        engine="vllm",
        reason=reasons.NO_TOKEN_IDS,
        detail="no token ids",
    ),
    _Rule(
        "allow log probabilities in the engine: it sent none with logprobs: true",
        reason=reasons.NO_TOKEN_IDS,
        detail="no log probabilities",
    ),
    _Rule(
        "serve the model with an engine that returns token ids (vLLM, SGLang, llama-server), or name the engine "
        "adapter: --engine",
        reason=reasons.NO_TOKEN_IDS,
    ),
    _Rule(
        "upgrade the engine (vLLM's tool parsers lost ids in streams before December 2025), or --streaming never",
        mode="streamed",
        reason=reasons.TOKEN_COUNT_MISMATCH,
    ),
    _Rule(
        "the engine sent no real log probability for a sampled token: upgrade it",
        reason=reasons.LOG_PROB_PLACEHOLDER,
    ),
)


def advice(engine: str, mode: str, reason: str, detail: str) -> str:
    """One piece of advice, or nothing where there is none to give.

    ``reason`` is one of ``reasons``, empty for a call that the engine refused; ``detail`` its particulars.
    """
    return next((rule.text for rule in _RULES if rule.fits(engine, mode, reason, detail)), "")
