"""Responses and stream chunks in the shape, field order and nulls of vLLM 0.32."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, Final, Protocol

from token_id_capture.testing.policy import SampledToken
from token_id_capture.testing.request import GenerationRequest
from token_id_capture.testing.template import END_OF_TURN, THINK, TurnReader, decode, token_text

SYSTEM_FINGERPRINT: Final = "vllm-0.32.0-policy"
_LOWEST_LOG_PROB: Final = -9999.0  # vLLM's stand-in for minus infinity, which JSON cannot carry


class Choice:
    """One choice while it is generated."""

    def __init__(self, index: int, prompt: Sequence[int], max_tokens: int) -> None:
        self.index = index
        self.prompt = prompt
        self.tokens: list[SampledToken] = []
        call_ids = (f"chatcmpl-tool-{_identifier()}" for _ in repeat(None))
        self.reader = TurnReader(call_ids=call_ids, thinking=prompt[-1:] == (THINK,))
        self._max_tokens = max_tokens

    def append(self, token: SampledToken) -> dict[str, Any]:
        """Take a token; return what it adds to the message."""
        self.tokens.append(token)
        delta = self.reader.feed(token.token_id)
        return self.reader.finish() or delta if self.finish_reason else delta

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    @property
    def finish_reason(self) -> str | None:
        """``stop`` or ``length``, or None while more is to come."""
        if self.tokens and self.tokens[-1].token_id == END_OF_TURN:
            return "stop"
        return "length" if len(self.tokens) == self._max_tokens else None


class WireResponse(Protocol):
    """How one endpoint says what was generated."""

    def first_chunks(self, choices: Sequence[Choice]) -> Iterator[dict[str, Any]]:
        """Chunks before any token."""
        ...

    def chunk(self, choice: Choice, delta: dict[str, Any]) -> dict[str, Any] | None:
        """The chunk for the newest token of a choice; None where vLLM sends none."""
        ...

    def usage_chunk(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The last chunk of a stream with ``include_usage``."""
        ...

    def body(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The whole response without a stream."""
        ...


class _Response:
    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.head = {"id": f"{self.prefix}-{_identifier()}", "created": int(time.time()), "model": request.model}

    def envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.head["id"],
            "object": kind,
            "created": self.head["created"],
            "model": self.head["model"],
        }

    def usage_chunk(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return {
            **self.envelope(self.chunk_kind),
            "choices": [],
            "usage": self.usage(choices),
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        read = sum(map(len, self.request.prompts))
        said = sum(len(choice.tokens) for choice in choices)
        return {"prompt_tokens": read, "total_tokens": read + said, "completion_tokens": said}

    def full_usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return {**self.usage(choices), "prompt_tokens_details": None, "completion_tokens_details": None}

    def if_ids(self, value: Any) -> Any:
        return value if self.request.return_token_ids else None

    def shown(self, token: int) -> str:
        return f"token_id:{token}" if self.request.tokens_as_ids else token_text(token)


class ChatResponse(_Response):
    """``/v1/chat/completions``."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first_chunks(self, choices: Sequence[Choice]) -> Iterator[dict[str, Any]]:
        for choice in choices:
            opening = {
                "index": choice.index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            prompt = {"prompt_token_ids": self.if_ids(choice.prompt), "prompt_text": None}
            yield {**self.envelope(self.chunk_kind), "choices": [opening], **prompt}

    def chunk(self, choice: Choice, delta: dict[str, Any]) -> dict[str, Any] | None:
        asked = self.request.return_token_ids or self.request.logprobs is not None
        if not (delta or asked or choice.finish_reason):
            return None  # a token without text, for a client that sees only text
        entry: dict[str, Any] = {
            "index": choice.index,
            "delta": delta,
            "logprobs": self._log_probs(choice.tokens[-1:]),
            "finish_reason": self._finish_reason(choice),
        }
        if choice.finish_reason:
            entry["stop_reason"] = None
        entry["token_ids"] = self.if_ids([choice.tokens[-1].token_id])
        return {**self.envelope(self.chunk_kind), "choices": [entry]}

    def body(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return {
            **self.envelope(self.kind),
            "choices": [self._choice(choice) for choice in choices],
            "service_tier": None,
            "system_fingerprint": SYSTEM_FINGERPRINT,
            "usage": self.full_usage(choices),
            "prompt_logprobs": None,
            "prompt_token_ids": self.if_ids(self.request.prompts[0]),
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _choice(self, choice: Choice) -> dict[str, Any]:
        calls = choice.reader.tool_calls
        message: dict[str, Any] = {
            "role": "assistant",
            "content": choice.reader.content or (None if calls else ""),
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
        }
        if calls:
            message["tool_calls"] = calls
        message["reasoning"] = choice.reader.reasoning
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._log_probs(choice.tokens),
            "finish_reason": self._finish_reason(choice),
            "stop_reason": None,
            "token_ids": self.if_ids(choice.token_ids),
            "routed_experts": None,
        }

    @staticmethod
    def _finish_reason(choice: Choice) -> str | None:
        return "tool_calls" if choice.finish_reason == "stop" and choice.reader.tool_calls else choice.finish_reason

    def _log_probs(self, tokens: Sequence[SampledToken]) -> dict[str, Any] | None:
        if self.request.logprobs is None:
            return None
        return {
            "content": [
                {
                    **self._log_prob(token.token_id, token.log_prob),
                    "top_logprobs": [self._log_prob(*alternative) for alternative in token.top],
                }
                for token in tokens
            ]
        }

    def _log_prob(self, token: int, log_prob: float) -> dict[str, Any]:
        return {
            "token": self.shown(token),
            "logprob": max(log_prob, _LOWEST_LOG_PROB),
            "bytes": list(token_text(token).encode()),
        }


class CompletionResponse(_Response):
    """``/v1/completions``."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def first_chunks(self, choices: Sequence[Choice]) -> Iterator[dict[str, Any]]:
        return iter(())

    def chunk(self, choice: Choice, delta: dict[str, Any]) -> dict[str, Any] | None:
        newest = choice.tokens[-1:]
        first = len(choice.tokens) == 1
        entry = {
            "index": choice.index,
            "text": decode(choice.token_ids[-1:]),
            "logprobs": self._log_probs(newest, offset=len(decode(choice.token_ids[:-1]))),
            "finish_reason": choice.finish_reason,
            "stop_reason": None,
            "prompt_token_ids": self.if_ids(choice.prompt) if first else None,
            "token_ids": self.if_ids([newest[0].token_id]),
        }
        return {**self.envelope(self.chunk_kind), "choices": [entry]}

    def body(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return {
            **self.envelope(self.kind),
            "choices": [self._choice(choice) for choice in choices],
            "service_tier": None,
            "system_fingerprint": SYSTEM_FINGERPRINT,
            "usage": self.full_usage(choices),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": decode(choice.token_ids),
            "logprobs": self._log_probs(choice.tokens, offset=0),
            "finish_reason": choice.finish_reason,
            "stop_reason": None,
            "token_ids": self.if_ids(choice.token_ids),
            "prompt_logprobs": None,
            "prompt_token_ids": self.if_ids(choice.prompt),
            "routed_experts": None,
        }

    def _log_probs(self, tokens: Sequence[SampledToken], *, offset: int) -> dict[str, Any] | None:
        if self.request.logprobs is None:
            return None
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(decode((token.token_id,)))
        return {
            "text_offset": offsets,
            "token_logprobs": [max(token.log_prob, _LOWEST_LOG_PROB) for token in tokens],
            "tokens": [self.shown(token.token_id) for token in tokens],
            "top_logprobs": [
                {self.shown(token.token_id): token.log_prob}
                | {self.shown(alternative): log_prob for alternative, log_prob in token.top}
                for token in tokens
            ],
        }


def _identifier() -> str:
    return uuid.uuid4().hex[:16]
