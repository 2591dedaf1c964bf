"""vLLM, and servers that took over its fields (``return_token_ids``).

Shapes of vLLM 0.32, chat: ``prompt_token_ids`` at the top of the reply and of each choice's first
chunk; ``choices[].token_ids`` and ``choices[].logprobs.content[].logprob``, in chunks for the new
tokens alone. Completions: ``prompt_token_ids``, ``token_ids`` and ``logprobs.token_logprobs`` all in
the choice. With ``return_tokens_as_token_ids`` the entries name a token ``token_id:95``.

Log probabilities below what its sampler keeps are sent as -9999.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from token_id_capture.server.engines.base import (
    ChoiceTokens,
    DeltaReader,
    Endpoint,
    StreamReader,
    array,
    choices_of,
)
from token_id_capture.server.json_splice import Hidden

_REASONING = ("reasoning", "reasoning_content")


class VllmEngine:
    """Asks with ``return_token_ids`` and log probabilities of the sampled tokens alone."""

    def request_fields(self, endpoint: Endpoint, body: Mapping[str, Any]) -> dict[str, Any]:
        """Log probabilities, token ids, and for chats reasoning: vLLM drops the ids of what it leaves out.

        ``top_logprobs`` is always sent as a number: a null has silently switched log probabilities off.
        """
        if endpoint is Endpoint.COMPLETIONS:
            fields = {} if body.get("logprobs") is not None else {"logprobs": 0}
            return {**fields, "return_token_ids": True}
        top = body.get("top_logprobs")
        return {
            "logprobs": True,
            "top_logprobs": 0 if top is None else top,
            "return_token_ids": True,
            "include_reasoning": True,
        }

    def read_reply(self, endpoint: Endpoint, reply: Mapping[str, Any]) -> dict[int, ChoiceTokens]:
        """Read a reply or a chunk; both have the arrays in the same places."""
        shared_prompt = array(reply.get("prompt_token_ids"))
        found: dict[int, ChoiceTokens] = {}
        for index, choice in choices_of(reply):
            tokens = ChoiceTokens(
                prompt_ids=array(choice.get("prompt_token_ids")) or shared_prompt,
                ids=array(choice.get("token_ids")),
                routed_experts=choice.get("routed_experts"),
                weight_version=_weight_version(choice.get("weight_versions")),
            )
            tokens.log_probs, tokens.texts = _log_probs(endpoint, choice.get("logprobs"))
            if not (tokens.prompt_ids is None and tokens.ids is None and tokens.log_probs is None):
                found[index] = tokens
        return found

    def stream_reader(self, endpoint: Endpoint) -> StreamReader:
        """Chunks carry the new tokens alone."""
        return DeltaReader(lambda chunk: self.read_reply(endpoint, chunk))

    def hidden(self, endpoint: Endpoint, body: Mapping[str, Any]) -> tuple[Hidden, ...]:
        """What was not asked for becomes null, which is what vLLM itself sends then."""
        paths: list[str] = []
        chat = endpoint is Endpoint.CHAT
        if not body.get("return_token_ids"):
            paths += ("choices.*.token_ids", "prompt_token_ids" if chat else "choices.*.prompt_token_ids")
        if not body.get("logprobs") if chat else body.get("logprobs") is None:
            paths.append("choices.*.logprobs")
        if chat and body.get("include_reasoning") is False:
            paths += (f"choices.*.{part}.{name}" for part in ("message", "delta") for name in _REASONING)
        return tuple(map(Hidden.at, paths))


def _log_probs(endpoint: Endpoint, log_probs: object) -> tuple[list[Any] | None, list[Any] | None]:
    """The log probabilities and the token texts beside them."""
    if not isinstance(log_probs, Mapping):
        return None, None
    if endpoint is Endpoint.COMPLETIONS:
        return array(log_probs.get("token_logprobs")), array(log_probs.get("tokens"))
    content = array(log_probs.get("content"))
    if content is None:
        return None, None
    entries = [entry if isinstance(entry, Mapping) else {} for entry in content]
    return [entry.get("logprob") for entry in entries], [entry.get("token") for entry in entries]


def _weight_version(spans: object) -> str | None:
    """The version of the weights, if one made the whole choice (``weight_versions`` of vLLM 0.33)."""
    versions = {span.get("version") for span in array(spans) or () if isinstance(span, Mapping)}
    version = versions.pop() if len(versions) == 1 else None
    return None if version is None else str(version)
