"""An engine of unknown kind: ask as for vLLM, and read whichever shape the response has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from token_id_capture.server.engines.base import OPENAI_PATHS, ChoiceTokens, Endpoint, Engine, Reader
from token_id_capture.server.text.json_splice import Hidden


class AutoEngine:
    """Decides by the response: the first of ``candidates`` that finds token ids in it reads it.

    The last of them is asked for as it wants to be, and reads what none of them finds ids in. So
    this fits servers that ignore fields they don't know.
    """

    # The engines' own endpoints need to know which engine it is.
    paths: Mapping[str, Endpoint] = OPENAI_PATHS

    def __init__(self, candidates: Sequence[Engine]) -> None:
        self._candidates = candidates

    def can_stream(self, endpoint: Endpoint, body: Mapping[str, Any]) -> bool:
        """As far as anybody knows."""
        return True

    def request_fields(self, endpoint: Endpoint, body: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the last candidate."""
        return self._candidates[-1].request_fields(endpoint, body)

    def reader(self, endpoint: Endpoint, body: Mapping[str, Any]) -> Reader:
        """A reader that lets all candidates read along."""
        return _FirstReader([engine.reader(endpoint, body) for engine in self._candidates])

    def hidden(self, endpoint: Endpoint, body: Mapping[str, Any]) -> tuple[Hidden, ...]:
        """What the last candidate hides, which asked; and of the others what it knows nothing of, as servers may
        send that unasked."""
        asking = self._candidates[-1]
        its_own = {rule.path for rule in asking.hidden(endpoint, {})}
        others = (rule for engine in self._candidates[:-1] for rule in engine.hidden(endpoint, body))
        return (*(rule for rule in others if rule.path not in its_own), *asking.hidden(endpoint, body))


class _FirstReader:
    def __init__(self, readers: Sequence[Reader]) -> None:
        self._readers = readers

    def add(self, part: Any) -> Mapping[str, Any]:
        return [reader.add(part) for reader in self._readers][-1]

    def tokens(self) -> dict[int, ChoiceTokens]:
        found = [reader.tokens() for reader in self._readers]
        return next(filter(_has_ids, found), found[-1])


def _has_ids(tokens: Mapping[int, ChoiceTokens]) -> bool:
    return any(choice.ids is not None or choice.log_prob_ids is not None for choice in tokens.values())
