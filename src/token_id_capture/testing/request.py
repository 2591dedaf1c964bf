"""Reads the requests that the test engine answers, and refuses them in vLLM's words."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from token_id_capture.testing.template import (
    APPENDING,
    ARGUMENTS,
    END_OF_THOUGHT,
    THINK,
    TOOL_CALL,
    VOCABULARY_SIZE,
    Habits,
    decode,
    encode,
    render_chat,
)

_Read = TypeVar("_Read")

_MOST_LOGPROBS = 20
_DEFAULT_COMPLETION_TOKENS = 16


class RefusedRequestError(Exception):
    """A request that the engine answers with an error: ``body`` and ``status`` are that answer."""

    def __init__(self, message: str, *, kind: str = "BadRequestError", param: str | None = None, code: int = 400):
        super().__init__(message)
        self.status = code
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class GenerationRequest:
    """A checked request of either generation endpoint.

    ``prompts`` holds token ids; each gives ``n`` choices. ``logprobs`` is None if none were asked
    for, else the number of alternatives. ``forced`` and ``banned`` come from ``tool_choice``.
    """

    model: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    n: int
    temperature: float
    seed: int | None
    logprobs: int | None
    return_token_ids: bool
    tokens_as_ids: bool
    stream: bool
    include_usage: bool
    forced: tuple[int, ...] = ()
    banned: frozenset[int] = frozenset()


def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request.

    Raises:
        RefusedRequestError: it is no JSON, or no object.
    """
    try:
        body = json.loads(raw)
    except UnicodeDecodeError as error:
        raise _invalid("json_invalid", "body", "JSON decode error", {}, "not UTF-8") from error
    except json.JSONDecodeError as error:
        raise _invalid("json_invalid", f"body.{error.pos}", "JSON decode error", {}, error.msg) from error
    if not isinstance(body, dict):
        raise _invalid("model_attributes_type", "body", "Input should be a valid dictionary", {})
    return body


def read_chat_request(
    body: Mapping[str, Any], max_model_len: int, habits: Habits = APPENDING, *, takes_prompt_ids: bool = True
) -> GenerationRequest:
    """Read the body of ``/v1/chat/completions``; with ``takes_prompt_ids`` it may bring the ids of its prompt.

    Raises:
        RefusedRequestError: what vLLM answers 400 as well.
    """
    return _or_refuse(lambda: _read_chat(body, max_model_len, habits, takes_prompt_ids))


def _read_chat(
    body: Mapping[str, Any], max_model_len: int, habits: Habits, takes_prompt_ids: bool
) -> GenerationRequest:
    wanted = body.get("max_completion_tokens") or body.get("max_tokens")
    given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids") if takes_prompt_ids else None
    prompt = chat_prompt(body, habits) if given is None else _token_ids(given)
    forced, banned = _tool_choice(body)
    if forced and prompt[-1] == THINK:
        forced = (END_OF_THOUGHT, *forced)
    return _request(
        body,
        [prompt],
        max_tokens=_count(body, "max_tokens", max_model_len if wanted is None else wanted),
        max_model_len=max_model_len,
        logprobs=(body.get("top_logprobs") or 0) if body.get("logprobs") else None,
        forced=forced,
        banned=banned,
    )


def read_completion_request(body: Mapping[str, Any], max_model_len: int) -> GenerationRequest:
    """Read the body of ``/v1/completions``: a text, token ids, or a list of either.

    Raises:
        RefusedRequestError: what vLLM answers 400 as well.
    """
    return _or_refuse(lambda: _read_completion(body, max_model_len))


def _read_completion(body: Mapping[str, Any], max_model_len: int) -> GenerationRequest:
    prompt = body.get("prompt")
    if prompt is None:
        raise _invalid("missing", "body.prompt", "Field required", body)
    several = isinstance(prompt, list) and not all(isinstance(item, int) for item in prompt)
    logprobs = body.get("logprobs")
    return _request(
        body,
        [_prompt_ids(item) for item in (prompt if several else [prompt])],
        max_tokens=_count(body, "max_tokens", _DEFAULT_COMPLETION_TOKENS),
        max_model_len=max_model_len,
        logprobs=None if logprobs is None or logprobs is False else int(logprobs),
    )


def chat_prompt(body: Mapping[str, Any], habits: Habits = APPENDING) -> list[int]:
    """The prompt's token ids of a body with ``messages`` and perhaps ``tools``.

    ``add_generation_prompt`` is honoured, and of ``chat_template_kwargs`` the member ``preserve_thinking``.

    Raises:
        RefusedRequestError: the body has no messages, or malformed ones.
    """
    messages, tools = body.get("messages"), body.get("tools")
    if messages is None:
        raise _invalid("missing", "body.messages", "Field required", body)
    if not isinstance(messages, list) or not isinstance(tools, list | None):
        raise RefusedRequestError("messages and tools must be lists")
    if (body.get("chat_template_kwargs") or {}).get("preserve_thinking"):
        habits = replace(habits, keeps_reasoning=True)
    try:
        return render_chat(messages, tools, generation=body.get("add_generation_prompt", True) is True, habits=habits)
    except (TypeError, ValueError) as error:
        raise RefusedRequestError(str(error)) from error


def prompt_text(body: Mapping[str, Any]) -> str:
    """The text of the ``tokens`` of a body.

    Raises:
        RefusedRequestError: they are not a list of token ids.
    """
    return decode(_token_ids(body.get("tokens")), marks=True)


def _prompt_ids(prompt: Any) -> list[int]:
    return encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)


def _token_ids(prompt: Any) -> list[int]:
    if isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt):
        outside = next((token for token in prompt if not 0 <= token < VOCABULARY_SIZE), None)
        if outside is None:
            return prompt
        raise RefusedRequestError(f"Token id {outside} is out of vocabulary", param="prompt")
    raise RefusedRequestError("prompt must be a text, a non-empty list of token ids, or a list of these")


def _request(
    body: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    max_model_len: int,
    logprobs: int | None,
    forced: tuple[int, ...] = (),
    banned: frozenset[int] = frozenset(),
) -> GenerationRequest:
    longest = max((len(prompt) for prompt in prompts), default=0)
    if longest >= max_model_len:
        raise RefusedRequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains at least "
            f"{longest} input tokens, which exceeds this limit even without any output tokens. Please reduce the "
            f"length of the input prompt. (parameter=input_tokens, value={longest})",
            param="input_tokens",
        )
    if logprobs is not None and logprobs > _MOST_LOGPROBS:
        raise RefusedRequestError(
            f"Requested sample logprobs of {logprobs}, which is greater than max allowed: {_MOST_LOGPROBS} "
            f"(parameter=logprobs, value={logprobs})",
            param="logprobs",
        )
    return GenerationRequest(
        model=str(body.get("model") or ""),
        prompts=tuple(map(tuple, prompts)),
        max_tokens=min(max_tokens, max_model_len - longest),
        n=_count(body, "n", 1),
        temperature=_temperature(body),
        seed=body.get("seed"),
        logprobs=logprobs,
        return_token_ids=bool(body.get("return_token_ids")),
        tokens_as_ids=bool(body.get("return_tokens_as_token_ids")),
        stream=bool(body.get("stream")),
        include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
        forced=forced,
        banned=banned,
    )


def _count(body: Mapping[str, Any], field: str, default: int) -> int:
    value = body.get(field)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise RefusedRequestError(
            f"{field} must be at least 1, got {value}. (parameter={field}, value={value})", param=field
        )
    return value


def _temperature(body: Mapping[str, Any]) -> float:
    value = body.get("temperature")
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise RefusedRequestError(
            f"temperature must be non-negative, got {value}. (parameter=temperature, value={value})",
            param="temperature",
        )
    return float(value)


def _tool_choice(body: Mapping[str, Any]) -> tuple[tuple[int, ...], frozenset[int]]:
    """How the first tokens are forced, and which tokens are banned."""
    choice = body.get("tool_choice")
    if choice in (None, "auto"):
        return (), frozenset()
    if choice == "none":
        return (), frozenset({TOOL_CALL})
    names: list[str] = [tool["function"]["name"] for tool in body.get("tools") or ()]
    if choice == "required" and names:
        return (TOOL_CALL,), frozenset()
    named: Any = choice["function"]["name"] if isinstance(choice, dict) else None
    if named in names:
        return (TOOL_CALL, *encode(named), ARGUMENTS), frozenset()
    raise RefusedRequestError(f"tool_choice {choice!r} names none of the request's tools", param="tool_choice")


def _or_refuse(read: Callable[[], _Read]) -> _Read:
    """A field of a wrong type is found where it is used; that is the client's fault, not a crash."""
    try:
        return read()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RefusedRequestError(f"malformed request: {error}") from error


def _invalid(kind: str, where: str, problem: str, body: Mapping[str, Any], cause: str = "") -> RefusedRequestError:
    described = {"type": kind, "loc": where, "msg": problem, "input": f"<dict of {len(body)} items>"}
    if cause:
        described["ctx"] = {"error": cause}  # type: ignore[assignment]
    return RefusedRequestError(f"1 validation error:\n  {described}", kind="Bad Request", param=where)
