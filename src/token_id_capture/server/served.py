"""What one captured call produced, read from a complete reply or merged from the chunks of a stream.

Both ways give the same ``ServedReply`` for the same generation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from token_id_capture.server.engines.base import ChoiceTokens, Endpoint, Engine, choices_of
from token_id_capture.server.messages import MessageMerger, message_item


@dataclass
class ServedChoice:
    """One choice: its assistant message as a content item, and its tokens."""

    item: dict[str, Any]
    finish_reason: str | None
    tokens: ChoiceTokens


@dataclass
class ServedReply:
    """A whole reply; ``choices`` are in the order of their indices."""

    response_id: str | None = None
    model: str | None = None
    completion_tokens: int | None = None
    choices: list[ServedChoice] = field(default_factory=list)

    def add_head(self, reply: Mapping[str, Any]) -> None:
        """Take id, model and token count where a reply or chunk has them."""
        self.response_id = self.response_id or _text(reply.get("id"))
        self.model = self.model or _text(reply.get("model"))
        usage = reply.get("usage")
        count = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
        if type(count) is int:
            self.completion_tokens = count


def read_reply(engine: Engine, endpoint: Endpoint, reply: Mapping[str, Any]) -> ServedReply:
    """Read a complete reply."""
    served = ServedReply()
    served.add_head(reply)
    tokens = engine.read_reply(endpoint, reply)
    for index, choice in sorted(choices_of(reply), key=lambda numbered: numbered[0]):
        item = message_item(_content(endpoint, choice, "message"))
        finish_reason = _text(choice.get("finish_reason"))
        served.choices.append(ServedChoice(item, finish_reason, tokens.get(index, ChoiceTokens())))
    return served


class StreamMerger:
    """Merges the chunks of a stream, and knows how far each choice is."""

    def __init__(self, engine: Engine, endpoint: Endpoint, expected_choices: int) -> None:
        self._reader = engine.stream_reader(endpoint)
        self._endpoint = endpoint
        self._expected = expected_choices
        self._messages: dict[int, MessageMerger] = {}
        self._finish_reasons: dict[int, str] = {}
        self._served = ServedReply()

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
        self._reader.add(chunk)
        self._served.add_head(chunk)
        for index, choice in choices_of(chunk):
            self._messages.setdefault(index, MessageMerger()).add(_content(self._endpoint, choice, "delta"))
            finish_reason = _text(choice.get("finish_reason"))
            if finish_reason is not None:
                self._finish_reasons[index] = finish_reason

    def reply(self) -> ServedReply:
        """The whole reply."""
        tokens = self._reader.tokens()
        self._served.choices = [
            ServedChoice(
                message_item(self._messages[index].message()),
                self._finish_reasons.get(index),
                tokens.get(index, ChoiceTokens()),
            )
            for index in sorted(self._messages)
        ]
        return self._served


def _content(endpoint: Endpoint, choice: Mapping[str, Any], carrier: str) -> Mapping[str, Any]:
    """The message or delta of a choice; the text of a completion counts as content."""
    if endpoint is Endpoint.COMPLETIONS:
        return {"content": choice.get("text")}
    content = choice.get(carrier)
    return content if isinstance(content, Mapping) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
