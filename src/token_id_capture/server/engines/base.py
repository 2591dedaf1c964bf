"""What the gateway must know of an engine, and nothing else.

The gateway does the rest the same way for all of them: it sends the request, passes the reply on,
compares counts, and stores. An engine is chosen by its name, in ``engines/__init__.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from token_id_capture.server.json_splice import Hidden


class Endpoint(Enum):
    """The generation endpoints whose calls are captured."""

    CHAT = "chat"
    COMPLETIONS = "completions"


@dataclass
class ChoiceTokens:
    """What a reply says of the tokens of one choice; None where it says nothing.

    ``ids`` and ``log_probs`` have one item for each generated token, unchecked. ``texts`` are the
    tokens as the log probability entries write them: where all of them read ``token_id:N`` they
    give the ids, or a second witness of them. ``routed_experts`` is opaque.
    """

    prompt_ids: list[Any] | None = None
    ids: list[Any] | None = None
    log_probs: list[Any] | None = None
    texts: list[Any] | None = None
    routed_experts: Any = None
    weight_version: str | None = None


class StreamReader(Protocol):
    """Collects the tokens of one streamed reply."""

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Take the next chunk, a parsed JSON object. Unknown shapes are ignored, never an error."""
        ...

    def tokens(self) -> dict[int, ChoiceTokens]:
        """What was collected, by choice index; empty if no chunk carried token arrays."""
        ...


class Engine(Protocol):
    """How one engine is asked for token ids and log probabilities, and where it puts them."""

    def request_fields(self, endpoint: Endpoint, body: Mapping[str, Any]) -> dict[str, Any]:
        """The top-level fields to set in the request, whatever the client sent there."""
        ...

    def read_reply(self, endpoint: Endpoint, reply: Mapping[str, Any]) -> dict[int, ChoiceTokens]:
        """The tokens of a complete reply, by choice index; empty if it carries no token arrays."""
        ...

    def stream_reader(self, endpoint: Endpoint) -> StreamReader:
        """A reader for one streamed reply."""
        ...

    def hidden(self, endpoint: Endpoint, body: Mapping[str, Any]) -> tuple[Hidden, ...]:
        """What the client of this request did not ask for, in replies and in stream chunks."""
        ...


class DeltaReader:
    """A ``StreamReader`` for engines whose chunks each carry the tokens that are new in them."""

    def __init__(self, read: Callable[[Mapping[str, Any]], dict[int, ChoiceTokens]]) -> None:
        self._read = read
        self._tokens: dict[int, ChoiceTokens] = {}

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Append the chunk's arrays; prompt ids come once, with the first chunk that has them."""
        for index, new in self._read(chunk).items():
            known = self._tokens.setdefault(index, ChoiceTokens())
            if known.prompt_ids is None:
                known.prompt_ids = new.prompt_ids
            known.ids = _extended(known.ids, new.ids)
            known.log_probs = _extended(known.log_probs, new.log_probs)
            known.texts = _extended(known.texts, new.texts)
            known.routed_experts = known.routed_experts if new.routed_experts is None else new.routed_experts
            known.weight_version = new.weight_version or known.weight_version

    def tokens(self) -> dict[int, ChoiceTokens]:
        """What was collected, by choice index."""
        return self._tokens


def _extended(known: list[Any] | None, new: list[Any] | None) -> list[Any] | None:
    if known is None:
        return None if new is None else list(new)
    known.extend(new or ())
    return known


def choices_of(reply: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The choices of a reply or chunk with their indices; what is no choice is passed over."""
    choices = reply.get("choices")
    for position, choice in enumerate(choices if isinstance(choices, list) else ()):
        if isinstance(choice, Mapping):
            index = choice.get("index")
            yield (index if type(index) is int else position), choice


def array(value: object) -> list[Any] | None:
    """``value`` if it is a list; None for all else."""
    return value if isinstance(value, list) else None
