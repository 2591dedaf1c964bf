"""From what a call produced to the entries that are stored, or to the reason why not.

All or nothing: one choice whose arrays are missing, unequal or no numbers refuses the whole call,
and a wrong item never just shortens an array.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from time import time
from typing import Any, Final, TypeAlias

from pydantic import ValidationError

from token_id_capture import reasons
from token_id_capture.capture.context import CaptureContext
from token_id_capture.capture.recorder import describe_validation
from token_id_capture.errors import InvalidEntryError
from token_id_capture.records import TokenEntry, choice_call_id
from token_id_capture.server.wire.response import EngineChoice, EngineResponse
from token_id_capture.tokens import LogProbs, TokenIds

SAMPLING_FIELDS: Final[Set[str]] = {
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "max_tokens",
    "max_completion_tokens",
    "n",
    "best_of",
    "echo",
    "response_format",
    "structured_outputs",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning_effort",
    "chat_template_kwargs",
    # vLLM's and SGLang's own: other search than sampling, and what may be sampled at all.
    "use_beam_search",
    "length_penalty",
    "allowed_token_ids",
    "bad_words",
    "regex",
    "ebnf",
    "json_schema",
    "custom_logit_processor",
    # llama-server's own.
    "n_predict",
    "samplers",
    "typical_p",
    "top_n_sigma",
    "repeat_penalty",
    "repeat_last_n",
    "dynatemp_range",
    "dynatemp_exponent",
    "xtc_probability",
    "xtc_threshold",
    "dry_multiplier",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
    "grammar",
    # Where an engine's own endpoint has them, all together.
    "sampling_params",
}
"""The fields of a request that say how to sample; those that are present are stored."""

_SPELLED_ID = re.compile(r"token_id:([0-9]{1,10})")


def is_all_zero(log_probs: Sequence[float]) -> bool:
    """Whether each of several tokens was sampled with probability 1: an engine's default rather than the truth."""
    return len(log_probs) > 1 and not any(log_probs)


class NotCapturableError(Exception):
    """The call's tokens cannot be stored; ``reason`` is one of ``reasons``, ``detail`` the particulars."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class CapturedRequest:
    """What of a request is kept with its entries."""

    model: str
    sampling: dict[str, Any]
    log_probs_mode: str | None
    stamped_version: Callable[[], str | None] | None = None
    """The weight version that a trainer stamped, asked once the response has come."""

    @classmethod
    def of(
        cls, body: Mapping[str, Any], log_probs_mode: str | None, stamp: Callable[[], str | None] | None = None
    ) -> CapturedRequest:
        """Pick it from the body."""
        model = body.get("model")
        sampling = {name: value for name, value in body.items() if name in SAMPLING_FIELDS and value is not None}
        return cls(model if isinstance(model, str) else "", sampling, log_probs_mode, stamp)


def entries_from(
    context: CaptureContext, request: CapturedRequest, response: EngineResponse, media: Sequence[str] = ()
) -> list[TokenEntry]:
    """One entry for each choice; the first has the call's own id, the others add their position.

    ``media`` are the digests of the prompt's parts that are not text.

    Raises:
        NotCapturableError: the tokens are missing, not equally many, or no tokens.
    """
    arrays = _checked(response, request.sampling.get("n"))
    prompts: dict[int, TokenIds] = {}
    shared: dict[str, Any] = {
        "rollout_id": context.rollout_id,
        "model": response.model or request.model,
        "created_at": time(),
        "response_id": response.response_id,
        "sampling": request.sampling,
        "log_probs_mode": request.log_probs_mode,
        "agent": context.origin.agent,
        "parent_agent": context.origin.parent_agent,
        "purpose": context.origin.purpose,
        "offers_tools": context.origin.offers_tools,
        "translation": context.translation,
        "upstream": context.upstream,
        **({"session_headers": context.origin.session_headers} if context.origin.session_headers else {}),
        **({"media_digests": list(media)} if media else {}),
    }
    entries: list[TokenEntry] = []
    for position, (choice, (prompt, ids, log_probs)) in enumerate(zip(response.choices, arrays, strict=True)):
        tokens = choice.tokens
        spans, version = tokens.weight_versions, tokens.weight_version
        if version is None and not spans and request.stamped_version is not None:
            version = request.stamped_version()
        try:
            if id(prompt) not in prompts:
                prompts[id(prompt)] = TokenIds.of(prompt)
            entry = TokenEntry(
                **shared,
                model_call_id=choice_call_id(context.model_call_id, position),
                prompt_token_ids=prompts[id(prompt)],
                generation_token_ids=TokenIds.of(ids),
                generation_log_probs=LogProbs.of(log_probs),
                routed_experts=tokens.routed_experts,
                output_items=[choice.item],
                token_item_index=0,
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop,
                weight_version=version,
                **({"weight_versions": spans} if spans and version is None else {}),
            )
        except InvalidEntryError as error:
            raise NotCapturableError(reasons.INVALID_TOKENS, f"choice {position}: {error}") from error
        except ValidationError as error:
            problem = describe_validation(error)
            raise NotCapturableError(reasons.INVALID_TOKENS, f"choice {position}: {problem}") from error
        entries.append(entry)
    return entries


_Arrays: TypeAlias = tuple[Sequence[Any], Sequence[Any], Sequence[Any]]


def _checked(response: EngineResponse, n: object) -> list[_Arrays]:
    """The arrays of all choices, as many as the engine counted."""
    if response.problem is not None:
        raise NotCapturableError(reasons.INVALID_TOKENS, response.problem)
    if not response.choices:
        raise NotCapturableError(reasons.NO_TOKEN_IDS, "the response has no choices")
    arrays = [_arrays(position, choice, response) for position, choice in enumerate(response.choices)]
    _check_counts(arrays, response.completion_tokens)
    _check_prompts([prompt for prompt, _, _ in arrays], response.prompt_tokens, n)
    return arrays


def _arrays(position: int, choice: EngineChoice, response: EngineResponse) -> _Arrays:
    """The prompt ids, ids and log probabilities of a choice; an empty generation may lack the latter two."""
    tokens = choice.tokens
    if choice.finish_reason is None:
        raise NotCapturableError(reasons.LOST_STREAM, f"choice {position} has no finish reason")
    if tokens.problem is not None:
        raise NotCapturableError(reasons.INVALID_TOKENS, f"choice {position}: {tokens.problem}")
    named = [ids for ids in (tokens.log_prob_ids, _spelled_ids(tokens.texts)) if ids is not None]
    ids = next(iter(named), None) if tokens.ids is None else tokens.ids
    log_probs = tokens.log_probs
    if response.completion_tokens == 0 or (ids is not None and not ids):
        ids, log_probs = ids or [], log_probs or []
    prompt = tokens.prompt_ids or None  # nothing is sampled after nothing
    if prompt is None or ids is None or log_probs is None:
        wanted = (("prompt token ids", prompt), ("token ids", ids), ("log probabilities", log_probs))
        missing = ", ".join(f"no {name}" for name, values in wanted if values is None)
        raise NotCapturableError(reasons.NO_TOKEN_IDS, f"choice {position} has {missing}")
    _check_types(position, prompt, ids, log_probs)
    for witness in named:
        if len(ids) == len(log_probs):
            _check_same(position, ids, witness)
    return prompt, ids, log_probs


def _check_types(position: int, prompt: Sequence[Any], ids: Sequence[Any], log_probs: Sequence[Any]) -> None:
    """Packing takes booleans for numbers, and refuses all else that is none."""
    for name, values in (("prompt token ids", prompt), ("token ids", ids), ("log probabilities", log_probs)):
        if isinstance(values, list) and bool in set(map(type, values)):
            raise NotCapturableError(reasons.INVALID_TOKENS, f"choice {position}: a boolean among the {name}")


def _check_same(position: int, ids: Sequence[Any], witness: list[Any]) -> None:
    """The ids are those that the log probabilities name."""
    if ids == witness:
        return
    if len(witness) != len(ids):
        detail = f"choice {position}: {len(ids)} token ids, but the log probabilities name {len(witness)}"
        raise NotCapturableError(reasons.INVALID_TOKENS, detail)
    different = (index for index, pair in enumerate(zip(witness, ids, strict=True)) if pair[0] != pair[1])
    if (first := next(different, None)) is None:
        return  # a number such as 7.0, which packed ids are never equal to
    detail = f"choice {position}: token id {first} is {ids[first]}, but its log probability is for {witness[first]}"
    raise NotCapturableError(reasons.INVALID_TOKENS, detail)


def _check_counts(arrays: Sequence[_Arrays], completion_tokens: int | None) -> None:
    """As many ids as log probabilities in each choice, and as many in all as the engine counted."""
    ids = log_probs = 0
    equal = True
    for _, choice_ids, choice_log_probs in arrays:
        ids += len(choice_ids)
        log_probs += len(choice_log_probs)
        equal = equal and len(choice_ids) == len(choice_log_probs)
    if not equal or ids != completion_tokens:
        counted = "no count of" if completion_tokens is None else completion_tokens
        detail = f"{ids} token ids, {log_probs} log probabilities, {counted} completion tokens"
        raise NotCapturableError(reasons.TOKEN_COUNT_MISMATCH, detail)


def _check_prompts(prompts: Sequence[Sequence[Any]], counted: int | None, n: object) -> None:
    """As many prompt ids as the engine counted, if it did; a prompt with several choices counts once.

    A missing part of a prompt, such as what an image stands for, would be a context that the policy never had.
    """
    if counted is None:
        return
    lengths = list(map(len, prompts))
    step = n if type(n) is int and n > 0 and len(lengths) % n == 0 else 1
    if counted not in (sum(lengths), sum(lengths[::step])):
        detail = f"{sum(lengths[::step])} prompt token ids, {counted} prompt tokens"
        raise NotCapturableError(reasons.TOKEN_COUNT_MISMATCH, detail)


def _spelled_ids(texts: list[Any] | None) -> list[Any] | None:
    """The ids that token texts spell as ``token_id:N``; None unless all of them do."""
    if not texts:
        return None
    ids: list[Any] = []
    for text in texts:
        match = _SPELLED_ID.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            return None
        ids.append(int(match[1]))
    return ids
