"""An engine of unknown kind: ask as for vLLM, and read whichever shape the reply has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from token_id_capture.server.engines.base import ChoiceTokens, Endpoint, Engine, StreamReader
from token_id_capture.server.json_splice import Hidden


class AutoEngine:
    """Decides by the reply: the first of ``candidates`` that finds token arrays in it reads it.

    All of their request fields are sent, so this fits servers that ignore fields they don't know.
    """

    def __init__(self, candidates: Sequence[Engine]) -> None:
        self._candidates = candidates

    def request_fields(self, endpoint: Endpoint, body: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of all candidates."""
        fields: dict[str, Any] = {}
        for engine in self._candidates:
            fields.update(engine.request_fields(endpoint, body))
        return fields

    def read_reply(self, endpoint: Endpoint, reply: Mapping[str, Any]) -> dict[int, ChoiceTokens]:
        """What the first candidate that finds something finds."""
        return next(filter(None, (engine.read_reply(endpoint, reply) for engine in self._candidates)), {})

    def stream_reader(self, endpoint: Endpoint) -> StreamReader:
        """A reader that lets all candidates read along."""
        return _FirstReader([engine.stream_reader(endpoint) for engine in self._candidates])

    def hidden(self, endpoint: Endpoint, body: Mapping[str, Any]) -> tuple[Hidden, ...]:
        """What any candidate hides."""
        return tuple(rule for engine in self._candidates for rule in engine.hidden(endpoint, body))


class _FirstReader:
    def __init__(self, readers: Sequence[StreamReader]) -> None:
        self._readers = readers

    def add(self, chunk: Mapping[str, Any]) -> None:
        for reader in self._readers:
            reader.add(chunk)

    def tokens(self) -> dict[int, ChoiceTokens]:
        return next(filter(None, (reader.tokens() for reader in self._readers)), {})
