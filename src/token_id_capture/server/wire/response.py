"""What one captured call produced, read from a complete response or merged from the chunks of a stream.

Both ways give the same ``EngineResponse`` for the same generation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from token_id_capture.server.engines.base import ChoiceTokens, Endpoint, Reader, choices_of
from token_id_capture.server.wire.messages import MessageMerger, message_item


@dataclass
class EngineChoice:
    """One choice: its assistant message as a content item, and its tokens.

    ``stop`` is what ended it where the engine says: a stop string, or the id of a stop token.
    """

    item: dict[str, Any]
    finish_reason: str | None
    tokens: ChoiceTokens
    stop: str | int | None = None


@dataclass
class EngineResponse:
    """A whole response; ``choices`` are in the order of their indices.

    ``completion_tokens`` and ``prompt_tokens`` are the engine's own counts. ``problem`` says why the
    choices cannot be told apart.
    """

    response_id: str | None = None
    model: str | None = None
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    choices: list[EngineChoice] = field(default_factory=list)
    problem: str | None = None

    def add_head(self, response: Mapping[str, Any]) -> None:
        """Take id, model and token counts where a response or chunk has them."""
        self.response_id = self.response_id or _text(response.get("id"))
        self.model = self.model or _text(response.get("model"))
        usage = response.get("usage")
        if isinstance(usage, Mapping):
            self.completion_tokens = _count(usage.get("completion_tokens"), self.completion_tokens)
            self.prompt_tokens = _count(usage.get("prompt_tokens"), self.prompt_tokens)


def read_response(reader: Reader, endpoint: Endpoint, response: Any) -> EngineResponse:
    """Read a complete response."""
    shown = reader.add(response)
    served = EngineResponse()
    served.add_head(shown)
    tokens = reader.tokens()
    choices = sorted(choices_of(shown), key=lambda numbered: numbered[0])
    for index, choice in choices:
        item = message_item(_content(endpoint, choice, "message"))
        finish_reason = _text(choice.get("finish_reason"))
        found = tokens.get(index) or ChoiceTokens()
        served.choices.append(EngineChoice(item, finish_reason, found, _stop_of(choice)))
    if len({index for index, _ in choices}) < len(choices):
        served.problem = "two choices have the same index"
    return served


class StreamMerger:
    """Merges the chunks of a stream, and knows how far each choice is."""

    def __init__(self, reader: Reader, endpoint: Endpoint, expected_choices: int) -> None:
        self._reader = reader
        self._endpoint = endpoint
        self._expected = expected_choices
        self._messages: dict[int, MessageMerger] = {}
        self._finish_reasons: dict[int, str] = {}
        self._stops: dict[int, str | int | None] = {}
        self._served = EngineResponse()

    @property
    def generated(self) -> bool:
        """Whether all choices that were expected have their finish reason."""
        return len(self._finish_reasons) >= self._expected and not self.unfinished

    @property
    def counted(self) -> bool:
        """Whether the engine said how many tokens it generated."""
        return self._served.completion_tokens is not None

    @property
    def unfinished(self) -> list[int]:
        """The choices that began and have no finish reason yet."""
        return [index for index in self._messages if index not in self._finish_reasons]

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Take the next chunk."""
        shown = self._reader.add(chunk)
        self._served.add_head(shown)
        for index, choice in choices_of(shown):
            if self._endpoint is Endpoint.GENERATE or index not in self._messages:
                self._messages[index] = MessageMerger()  # a generate chunk has the whole message so far
            self._messages[index].add(_content(self._endpoint, choice, "delta"))
            finish_reason = _text(choice.get("finish_reason"))
            if finish_reason is not None:
                self._finish_reasons[index] = finish_reason
                self._stops[index] = _stop_of(choice)

    def response(self) -> EngineResponse:
        """The whole response."""
        tokens = self._reader.tokens()
        self._served.choices = [
            EngineChoice(
                message_item(self._messages[index].message()),
                self._finish_reasons.get(index),
                tokens.get(index, ChoiceTokens()),
                self._stops.get(index),
            )
            for index in sorted(self._messages)
        ]
        return self._served


def _content(endpoint: Endpoint, choice: Mapping[str, Any], carrier: str) -> Mapping[str, Any]:
    """The message or delta of a choice; the text of a completion counts as content."""
    if endpoint is Endpoint.COMPLETIONS:
        return {"content": choice.get("text")}
    content = choice.get("message" if endpoint is Endpoint.GENERATE else carrier)
    return content if isinstance(content, Mapping) else {}


def _count(value: object, known: int | None) -> int | None:
    return value if type(value) is int else known


def _stop_of(choice: Mapping[str, Any]) -> str | int | None:
    """What a choice says of its stop: vLLM in ``stop_reason``, SGLang in ``matched_stop``."""
    named = (choice.get(name) for name in ("stop_reason", "matched_stop"))
    return next((stop for stop in named if isinstance(stop, str) or type(stop) is int), None)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
