"""SGLang: chats and text completions of its OpenAI-compatible server, and its own ``/generate``.

Shapes of SGLang 0.5. A whole chat has ``choices[].prompt_token_ids`` and ``response_token_ids`` with
``return_token_ids``, and ``choices[].meta_info`` with ``return_meta_info``, which is all that builds
before mid 2026 know. A streamed chat refuses these fields; it has one chunk near its end, alone or as
an event of its own, in whose ``sglext`` are ``input_ids`` and the ``output_ids`` of each choice. Text
completions have ``token_ids`` and ``prompt_token_ids`` as vLLM's.

A streamed chat drops the log probability of a step that has no text, such as the token that ends the
answer, unless the server runs a reasoning or tool-call parser. So chats are not streamed from the
engine; ``--streaming always`` does it anyway.
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
    Reader,
    array,
    choices_of,
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
from token_id_capture.server.engines.sglang_generate import GenerateReader, hidden_in_generate, read_pairs
from token_id_capture.server.engines.vllm import read_log_probs
from token_id_capture.server.text.json_splice import Hidden
from token_id_capture.tokens import TokenIds

_WHOLE_CHAT: Final = ("return_token_ids", "return_prompt_token_ids", "return_meta_info")
_STREAMED_CHAT: Final = ("return_input_ids_in_sglext", "return_output_ids_in_sglext")


class SglangEngine:
    """Asks in the words of the endpoint, and takes ids and log probabilities wherever they come."""

    paths: Mapping[str, Endpoint] = {**OPENAI_PATHS, "/generate": Endpoint.GENERATE}

    def can_stream(self, endpoint: Endpoint, body: Mapping[str, Any]) -> bool:
        """Text completions stream every step; chats do not."""
        return endpoint is not Endpoint.CHAT

    def request_fields(self, endpoint: Endpoint, body: Mapping[str, Any]) -> dict[str, Any]:
        """Log probabilities, and ids by whichever fields the endpoint has for them."""
        if endpoint is Endpoint.GENERATE:
            return {"return_logprob": True, "return_prompt_token_ids": True}
        if endpoint is Endpoint.COMPLETIONS:
            fields = {} if body.get("logprobs") is not None else {"logprobs": 0}
            return {**fields, "return_token_ids": True}
        top = body.get("top_logprobs")
        names = _STREAMED_CHAT if body.get("stream") else _WHOLE_CHAT
        return {"logprobs": True, "top_logprobs": 0 if top is None else top, **dict.fromkeys(names, True)}

    def reader(self, endpoint: Endpoint, body: Mapping[str, Any]) -> Reader:
        """Of a chat all that its parts have; of ``/generate`` also what a cumulative stream repeats."""
        return GenerateReader(body) if endpoint is Endpoint.GENERATE else _ChoicesReader(endpoint)

    def hidden(self, endpoint: Endpoint, body: Mapping[str, Any]) -> tuple[Hidden, ...]:
        """What was not asked for: null where the server sends null then, else cut out."""
        if endpoint is Endpoint.GENERATE:
            return hidden_in_generate(body)
        chat = endpoint is Endpoint.CHAT
        rules: list[Hidden] = []
        if not body.get("logprobs") if chat else body.get("logprobs") is None:
            rules.append(Hidden.at("choices.*.logprobs"))
        ids, prompt = ("response_token_ids", "return_prompt_token_ids") if chat else ("token_ids", "return_token_ids")
        if not body.get("return_token_ids"):
            rules.append(Hidden.at(f"choices.*.{ids}", cut=chat))
            if not body.get(prompt):
                rules.append(Hidden.at("choices.*.prompt_token_ids", cut=chat))
        if chat and not body.get("return_meta_info"):
            rules.append(Hidden.at("choices.*.meta_info", cut=True))
        if chat:  # servers can be started to send these unasked
            named = zip(_STREAMED_CHAT, ("input_ids", "output_ids"), strict=True)
            rules += [Hidden.at(f"sglext.{name}", cut=True) for asked, name in named if not body.get(asked)]
        return tuple(rules)

    def prompt_fields(self, ids: JsonIds) -> dict[str, Any]:
        """SGLang reads the messages for its parsers and these ids for the model."""
        return {"input_ids": ids}

    def prompt_field_of(self, body: Mapping[str, Any]) -> str | None:
        """A client may bring ids of its own."""
        return deciding_field(body, "input_ids")

    async def render(
        self, body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], generation: bool, ask: Ask
    ) -> Rendered:
        """By ``/v1/tokenize``, which knows Jinja templates only."""
        answer = await ask("/v1/tokenize", template_question(body, messages, generation))
        return Rendered(ids_in(answer, "/v1/tokenize"), limit_in(answer))

    async def text(self, body: Mapping[str, Any], ids: TokenIds, ask: Ask) -> str:
        """By ``/v1/detokenize``, with the marks of turns in the text."""
        question = {"model": body.get("model"), "tokens": ids.tolist(), "skip_special_tokens": False}
        return text_in(await ask("/v1/detokenize", question), "text", "/v1/detokenize")


class _ChoicesReader(DeltaReader):
    """Adds the ids of ``sglext``, which come once and for all choices, to what the choices say."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(partial(_of_part, endpoint))
        self._prompt: list[Any] | TokenIds | None = None
        self._problem: str | None = None
        self._outputs: list[Any] = []
        self._version: str | None = None

    def add(self, part: Any) -> Mapping[str, Any]:
        shown = super().add(part)
        extension = shown.get("sglext")
        if isinstance(extension, Mapping):
            self._prompt, problem = same_prompt(self._prompt, array(extension.get("input_ids")) or None)
            self._problem = self._problem or problem
            self._outputs = array(extension.get("output_ids")) or self._outputs
        metadata = shown.get("metadata")
        if isinstance(metadata, Mapping):
            self._version = _version(metadata) or self._version
        return shown

    def tokens(self) -> dict[int, ChoiceTokens]:
        found = super().tokens()
        for index, tokens in found.items():
            tokens.prompt_ids, problem = same_prompt(tokens.prompt_ids, self._prompt)
            tokens.problem = tokens.problem or self._problem or problem
            if tokens.weight_versions is None:
                tokens.weight_version = tokens.weight_version or self._version
            output = array(self._outputs[index]) if 0 <= index < len(self._outputs) else None
            if tokens.ids is None:
                tokens.ids = output
            elif output is not None and output != tokens.ids:
                tokens.problem = tokens.problem or "the choice and sglext name different token ids"
        return found


def _of_part(endpoint: Endpoint, part: Mapping[str, Any]) -> dict[int, ChoiceTokens]:
    told = unwrapped(part)
    metadata = told.get("metadata")
    version = _version(metadata) if isinstance(metadata, Mapping) else None
    found = {index: _of_choice(endpoint, choice) for index, choice in choices_of(told)}
    for tokens in found.values():
        tokens.weight_version = tokens.weight_version or version
    return found


def _of_choice(endpoint: Endpoint, choice: Mapping[str, Any]) -> ChoiceTokens:
    name = "token_ids" if endpoint is Endpoint.COMPLETIONS else "response_token_ids"
    tokens = ChoiceTokens(prompt_ids=array(choice.get("prompt_token_ids")), ids=array(choice.get(name)))
    read_log_probs(tokens, endpoint, choice.get("logprobs"))
    meta = choice.get("meta_info")
    if isinstance(meta, Mapping):
        tokens.weight_version = _version(meta)
        tokens.routed_experts = meta.get("routed_experts")
        pairs = read_pairs(meta)
        if pairs is not None:
            tokens.log_prob_ids = [token for _, token in pairs]
            if tokens.log_probs is None:
                tokens.log_probs = [log_prob for log_prob, _ in pairs]
    return tokens


def _version(holder: Mapping[str, Any]) -> str | None:
    version = holder.get("weight_version")
    return None if version is None else str(version)
