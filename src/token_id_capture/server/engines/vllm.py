"""vLLM, and servers that took over its fields (``return_token_ids``).

Shapes of vLLM 0.32, chat: ``prompt_token_ids`` at the top of the response and of each choice's first
chunk; ``choices[].token_ids`` and ``choices[].logprobs.content[].logprob``, in chunks for the new
tokens alone. Completions: ``prompt_token_ids``, ``token_ids`` and ``logprobs.token_logprobs`` all in
the choice. ``/inference/v1/generate`` takes and gives ids, ``prompt_token_ids`` as a chat does, and
its log probability entries name a ``token_id``. With ``return_tokens_as_token_ids`` the entries of
the other two name a token ``token_id:95``.

Log probabilities below what its sampler keeps are sent as -9999.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from token_id_capture.server.engines.base import (
    OPENAI_PATHS,
    Ask,
    ChoiceTokens,
    DeltaReader,
    Endpoint,
    PackedLogProbs,
    Reader,
    array,
    choices_of,
    entries_of,
    id_array,
    is_token_list,
    same_prompt,
    unwrapped,
)
from token_id_capture.server.engines.continuing import (
    JsonIds,
    Rendered,
    deciding_field,
    ids_in,
    limit_in,
    template_question,
    text_in,
)
from token_id_capture.server.engines.weights import only_version
from token_id_capture.server.text.json_splice import Hidden
from token_id_capture.tokens import TokenIds

_REASONING: Final = ("reasoning", "reasoning_content")


class VllmEngine:
    """Asks with ``return_token_ids`` and log probabilities of the sampled tokens alone."""

    reads_packed_arrays = True
    paths: Mapping[str, Endpoint] = {**OPENAI_PATHS, "/inference/v1/generate": Endpoint.GENERATE}

    def can_stream(self, endpoint: Endpoint, body: Mapping[str, Any]) -> bool:
        """Streams carry everything."""
        return True

    def request_fields(self, endpoint: Endpoint, body: Mapping[str, Any]) -> dict[str, Any]:
        """Log probabilities, token ids, weight versions, and for chats reasoning: vLLM drops the ids of what
        it leaves out.

        ``top_logprobs`` is always sent as a number: a null has silently switched log probabilities off.
        """
        if endpoint is Endpoint.COMPLETIONS:
            fields = {} if body.get("logprobs") is not None else {"logprobs": 0}
            return {**fields, "return_token_ids": True}
        if endpoint is Endpoint.GENERATE:
            return {"return_token_ids": True, **_generate_fields(body)}
        top = body.get("top_logprobs")
        return {
            "logprobs": True,
            "top_logprobs": 0 if top is None else top,
            "return_token_ids": True,
            "include_reasoning": True,
            "return_weight_versions": True,
        }

    def reader(self, endpoint: Endpoint, body: Mapping[str, Any]) -> Reader:
        """Chunks carry the new tokens alone."""
        if endpoint is Endpoint.GENERATE:
            return _GenerateReader(body)
        return DeltaReader(partial(_of_part, endpoint, None))

    def hidden(self, endpoint: Endpoint, body: Mapping[str, Any]) -> tuple[Hidden, ...]:
        """What was not asked for becomes null, which is what vLLM itself sends then."""
        paths: list[str] = []
        chat = endpoint is Endpoint.CHAT
        asked: Any = body.get("logprobs")
        if endpoint is Endpoint.GENERATE:
            asked = _object(body.get("sampling_params")).get("logprobs")
        if not body.get("return_token_ids"):
            paths.append("choices.*.prompt_token_ids" if endpoint is Endpoint.COMPLETIONS else "prompt_token_ids")
            # The ids of a generate call are its answer, not an addition.
            paths += [] if endpoint is Endpoint.GENERATE else ["choices.*.token_ids"]
        if not asked if chat else asked is None:
            paths.append("choices.*.logprobs")
        if chat and not body.get("return_weight_versions"):
            paths.append("choices.*.weight_versions")
        if chat and body.get("include_reasoning") is False:
            paths += (f"choices.*.{part}.{name}" for part in ("message", "delta") for name in _REASONING)
        return tuple(map(Hidden.at, paths))

    def prompt_fields(self, ids: JsonIds) -> dict[str, Any]:
        """vLLM 0.27 and later: a chat that a prefill server has rendered already. Parsing stays as ever."""
        return {"kv_transfer_params": {"prompt_token_ids": ids}}

    def prompt_field_of(self, body: Mapping[str, Any]) -> str | None:
        """The client may speak to a connector of its own by the same field."""
        return deciding_field(body, "kv_transfer_params")

    async def render(
        self, body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], generation: bool, ask: Ask
    ) -> Rendered:
        """By ``/tokenize``, which needs no flag."""
        answer = await ask("/tokenize", template_question(body, messages, generation))
        return Rendered(ids_in(answer, "/tokenize"), limit_in(answer))

    async def text(self, body: Mapping[str, Any], ids: TokenIds, ask: Ask) -> str:
        """By ``/detokenize``."""
        question = {"model": body["model"]} if body.get("model") is not None else {}
        return text_in(await ask("/detokenize", {**question, "tokens": ids.tolist()}), "prompt", "/detokenize")


def _generate_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Log probabilities, and of a stream the usage."""
    sampling, options = (_object(body.get(name)) for name in ("sampling_params", "stream_options"))
    fields: dict[str, Any] = {"stream_options": {**options, "include_usage": True}} if body.get("stream") else {}
    return (
        fields if sampling.get("logprobs") is not None else {**fields, "sampling_params": {**sampling, "logprobs": 0}}
    )


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


class _GenerateReader(DeltaReader):
    """Reads the engine's own endpoint, where what a call reads is what it was given."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        given = body.get("token_ids")
        super().__init__(partial(_of_part, Endpoint.GENERATE, given if is_token_list(given) else None))

    def add(self, part: Any) -> Mapping[str, Any]:
        shown = super().add(part)
        return {**shown, "id": shown.get("request_id")}


def _of_part(endpoint: Endpoint, given: list[Any] | None, part: Mapping[str, Any]) -> dict[int, ChoiceTokens]:
    prompt = id_array(unwrapped(part).get("prompt_token_ids")) or given
    return {index: _of_choice(endpoint, choice, prompt) for index, choice in choices_of(part)}


def _of_choice(endpoint: Endpoint, choice: Mapping[str, Any], prompt: list[Any] | TokenIds | None) -> ChoiceTokens:
    spans = array(choice.get("weight_versions"))
    prompt, problem = same_prompt(id_array(choice.get("prompt_token_ids")) or None, prompt)
    tokens = ChoiceTokens(
        prompt_ids=prompt,
        problem=problem,
        ids=id_array(choice.get("token_ids")),
        routed_experts=choice.get("routed_experts"),
        weight_version=only_version(spans),
        weight_versions=spans,
    )
    read_log_probs(tokens, endpoint, choice.get("logprobs"))
    return tokens


def read_log_probs(tokens: ChoiceTokens, endpoint: Endpoint, log_probs: object) -> None:
    """Set what the log probabilities of a choice say: the numbers, and how they name their tokens."""
    if endpoint is Endpoint.COMPLETIONS and isinstance(log_probs, dict) and "content" not in log_probs:
        tokens.log_probs, tokens.texts = array(log_probs.get("token_logprobs")), array(log_probs.get("tokens"))
        return
    if isinstance(log_probs, PackedLogProbs):
        tokens.log_probs = log_probs.values
        return
    entries = entries_of(log_probs)
    if entries is None:
        return
    tokens.log_probs = [entry.get("logprob") for entry in entries]
    tokens.texts = [entry.get("token") for entry in entries]
    # vLLM's own endpoint and llama-server name the id itself.
    for name in ("token_id", "id"):
        if any(name in entry for entry in entries):
            tokens.log_prob_ids = [entry.get(name) for entry in entries]
