"""How an engine is given the exact tokens of an earlier call in place of a rendered history.

Two optional extensions of ``Engine``; one without either cannot be used with ``--continuity``. An
engine that ``ContinuesPrompts`` takes a chat's whole prompt as ids, and its tokenizer endpoint shows
what its template writes. One that ``ContinuesPrefixes`` takes the known beginning alone, and puts the
rest of its own rendering behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import orjson

from token_id_capture.errors import InvalidEntryError
from token_id_capture.server.engines.base import Ask, EngineAnswerError
from token_id_capture.tokens import TokenIds

JsonIds: TypeAlias = orjson.Fragment | list[int]
"""Token ids as orjson writes them: a fragment is their JSON text."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt in tokens; ``limit`` is how many tokens prompt and generation may have, if the engine says so."""

    ids: TokenIds
    limit: int | None


class ContinuesPrompts(Protocol):
    """An engine whose chat takes the ids of its prompt, and keeps parsing the answer."""

    def prompt_fields(self, ids: JsonIds) -> dict[str, Any]:
        """The top-level fields by which a chat's prompt is these ids."""
        ...

    def prompt_field_of(self, body: Mapping[str, Any]) -> str | None:
        """A field of the client's request that decides by itself what the prompt is; None if there is none."""
        ...

    async def render(
        self, body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], generation: bool, ask: Ask
    ) -> Rendered:
        """The prompt of the chat ``body`` with these messages in place of its own.

        ``generation`` asks for the beginning of the next answer behind them.

        Raises:
            EngineAnswerError: the engine does not say.
        """
        ...

    async def text(self, body: Mapping[str, Any], ids: TokenIds, ask: Ask) -> str:
        """The text of tokens, for the model of the chat ``body``.

        Raises:
            EngineAnswerError: the engine does not say.
        """
        ...


class ContinuesPrefixes(Protocol):
    """An engine whose chat takes the ids that its prompt has to begin with."""

    def prefix_fields(self, known: JsonIds) -> dict[str, Any]:
        """The top-level fields by which a chat's prompt begins with these ids."""
        ...

    def prompt_field_of(self, body: Mapping[str, Any]) -> str | None:
        """As in ``ContinuesPrompts``."""
        ...


Continues: TypeAlias = ContinuesPrompts | ContinuesPrefixes

_DECIDING: Final = ("chat_template", "documents", "truncate_prompt_tokens")
_SWITCHES: Final = ("continue_final_message", "echo", "add_special_tokens")


def deciding_field(body: Mapping[str, Any], *own: str) -> str | None:
    """The first field of a chat that says how its prompt is made; ``own`` are further ones of the engine."""
    if body.get("add_generation_prompt") is False:
        return "add_generation_prompt"
    given = (name for name in (*_DECIDING, *own) if body.get(name) is not None)
    switched = (name for name in _SWITCHES if body.get(name))
    return next(given, None) or next(switched, None)


def template_question(
    body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], generation: bool
) -> dict[str, Any]:
    """What a tokenizer endpoint is asked to render: these messages with what else of the chat its template sees."""
    question: dict[str, Any] = {"messages": list(messages), "add_generation_prompt": generation}
    for name in ("model", "tools"):
        if body.get(name) is not None:
            question[name] = body[name]
    arguments = dict(body.get("chat_template_kwargs") or {})
    if (effort := body.get("reasoning_effort")) is not None:
        arguments.setdefault("reasoning_effort", effort)
    return {**question, "chat_template_kwargs": arguments} if arguments else question


def ids_in(answer: Any, path: str) -> TokenIds:
    """The ``tokens`` of a tokenizer endpoint's answer.

    Raises:
        EngineAnswerError: there are none.
    """
    tokens = answer.get("tokens") if isinstance(answer, Mapping) else None
    if not isinstance(tokens, list | TokenIds) or not tokens:
        raise EngineAnswerError(f"POST {path} answered without token ids")
    try:
        return TokenIds.of(tokens)
    except InvalidEntryError as error:
        raise EngineAnswerError(f"POST {path} answered with {error}") from error


def limit_in(answer: Mapping[str, Any]) -> int | None:
    """The length of the model's context in tokens, where the answer has it."""
    limit = answer.get("max_model_len")
    return limit if type(limit) is int and limit > 0 else None


def text_in(answer: Any, name: str, path: str) -> str:
    """The text of a detokenizer endpoint's answer.

    Raises:
        EngineAnswerError: there is none.
    """
    text = answer.get(name) if isinstance(answer, Mapping) else None
    if not isinstance(text, str):
        raise EngineAnswerError(f"POST {path} answered without a text")
    return text
