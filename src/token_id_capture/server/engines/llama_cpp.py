"""llama-server of llama.cpp.

The entries of its log probabilities name the id of each token: ``logprobs.content[].id`` in chats
and in text completions, ``completion_probabilities[].id`` in its own ``/completion``. It leaves them
out where ``top_logprobs`` is 0, so one alternative is asked for.

- The ids of a prompt are in no response. Where the client gave text, ``/apply-template`` and
  ``/tokenize`` tell them, at the price of one or two more requests, and only with
  ``--tokenize-prompts``: without it only prompts that were given as ids can be captured.
- A streamed chat loses the token that ends it, and refuses tools beside log probabilities. So chats
  are never streamed from the engine.
- Of a character that took several tokens, only the last token has an entry; a stop string takes its
  tokens from the entries and not from the count; with ``n`` above 1 the count is of the first choice
  alone. The comparison of counts marks such calls ``token_count_mismatch``, so a rollout with, say,
  an emoji that the vocabulary spells in bytes is masked.

Log probabilities are those before the sampler chain, whatever the temperature.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from token_id_capture.server.engines.base import (
    OPENAI_PATHS,
    Ask,
    ChoiceTokens,
    DeltaReader,
    Endpoint,
    EngineAnswerError,
    Reader,
    array,
    choices_of,
    is_token_list,
)
from token_id_capture.server.engines.vllm import read_log_probs
from token_id_capture.server.text.json_splice import Hidden

# Of a chat request, what says how to answer; the rest says what to ask.
_NOT_OF_THE_PROMPT: Final = frozenset({"stream", "stream_options", "logprobs", "top_logprobs", "n_probs"})
_FINISH_REASONS: Final = {"eos": "stop", "word": "stop", "limit": "length"}


class LlamaCppEngine:
    """Asks for log probabilities, and asks the tokenizer for the prompt where that is allowed."""

    # Without /v1 it serves /completions as its own endpoint.
    paths: Mapping[str, Endpoint] = {
        **OPENAI_PATHS,
        "/completion": Endpoint.GENERATE,
        "/completions": Endpoint.GENERATE,
    }

    # It was seen to close a connection after a stream, under the next request.
    keeps_connections = False

    def can_stream(self, endpoint: Endpoint, body: Mapping[str, Any]) -> bool:
        """Text completions stream every token; chats do not."""
        return endpoint is not Endpoint.CHAT

    def request_fields(self, endpoint: Endpoint, body: Mapping[str, Any]) -> dict[str, Any]:
        """Log probabilities of at least one alternative."""
        if endpoint is Endpoint.GENERATE:
            return {"n_probs": _at_least_one(body.get("n_probs")), "return_tokens": True}
        if endpoint is Endpoint.COMPLETIONS:
            return {"logprobs": _at_least_one(body.get("logprobs"))}
        return {"logprobs": True, "top_logprobs": _at_least_one(body.get("top_logprobs"))}

    def reader(self, endpoint: Endpoint, body: Mapping[str, Any]) -> Reader:
        """Parts carry the new tokens alone."""
        given = body.get("prompt")
        prompt = given if endpoint is not Endpoint.CHAT and is_token_list(given) else None
        if endpoint is Endpoint.GENERATE:
            return _CompletionReader(prompt)

        def of_part(part: Mapping[str, Any]) -> dict[int, ChoiceTokens]:
            found: dict[int, ChoiceTokens] = {}
            for index, choice in choices_of(part):
                found[index] = ChoiceTokens(prompt_ids=prompt)
                read_log_probs(found[index], endpoint, choice.get("logprobs"))
            return found

        return DeltaReader(of_part)

    def hidden(self, endpoint: Endpoint, body: Mapping[str, Any]) -> tuple[Hidden, ...]:
        """What was not asked for is cut out: llama-server sends no null in its place."""
        if endpoint is Endpoint.GENERATE:
            rules = [] if body.get("n_probs") else [Hidden.at("completion_probabilities", cut=True)]
            if not body.get("return_tokens") and not body.get("stream"):
                # Without return_tokens it sends an empty array; the chunks of a stream always have their tokens.
                rules.append(Hidden.at("tokens", instead="[]"))
            return tuple(rules)
        if body.get("logprobs"):
            return ()
        # With verbose it adds its own form of the response, with the same log probabilities.
        return (
            Hidden.at("choices.*.logprobs", cut=True),
            Hidden.at("__verbose.completion_probabilities", cut=True),
        )

    async def prompt_ids(self, endpoint: Endpoint, body: Mapping[str, Any], ask: Ask) -> list[Any]:
        """Let the engine render and tokenise the prompt as it does for the call itself.

        Raises:
            EngineAnswerError: it answers with no text or no ids, or there are several prompts.
        """
        text = body.get("prompt")
        if endpoint is Endpoint.CHAT:
            asked = {key: value for key, value in body.items() if key not in _NOT_OF_THE_PROMPT}
            text = _member(await ask("/apply-template", asked), "prompt")
        if not isinstance(text, str):
            raise EngineAnswerError(f"the prompt is a {type(text).__name__}, not one text")
        asked = {"content": text, "add_special": True, "parse_special": True}
        tokens = array(_member(await ask("/tokenize", asked), "tokens"))
        if tokens is None:
            raise EngineAnswerError("POST /tokenize answered without tokens")
        return tokens


class _CompletionReader:
    """Reads ``/completion``: one choice, whose content comes in pieces."""

    def __init__(self, prompt: list[Any] | None) -> None:
        self._tokens = DeltaReader(_of_completion)
        self._prompt = prompt
        self._content: list[str] = []

    def add(self, part: Any) -> Mapping[str, Any]:
        if not isinstance(part, Mapping):
            return {}
        self._tokens.add(part)
        content = part.get("content")
        self._content.append(content if isinstance(content, str) else "")
        message = {"role": "assistant", "content": "".join(self._content)}
        stop_type = str(part.get("stop_type"))
        finish_reason = _FINISH_REASONS.get(stop_type, stop_type) if part.get("stop") is True else None
        counts = {"completion_tokens": part.get("tokens_predicted"), "prompt_tokens": part.get("tokens_evaluated")}
        return {
            "model": part.get("model"),
            "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
            "usage": counts if part.get("stop") is True else None,
        }

    def tokens(self) -> dict[int, ChoiceTokens]:
        found = self._tokens.tokens()
        for tokens in found.values():
            tokens.prompt_ids = self._prompt
        return found


def _of_completion(part: Mapping[str, Any]) -> dict[int, ChoiceTokens]:
    tokens = ChoiceTokens(ids=array(part.get("tokens")))
    read_log_probs(tokens, Endpoint.GENERATE, {"content": part.get("completion_probabilities")})
    return {0: tokens}


def _at_least_one(asked: object) -> Any:
    """The number of alternatives that the client asked for, if it is one that works."""
    return 1 if asked is None or asked is False or asked == 0 else asked


def _member(response: Any, name: str) -> Any:
    return response.get(name) if isinstance(response, Mapping) else None
