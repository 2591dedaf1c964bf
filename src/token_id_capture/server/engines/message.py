"""Servers that put the token arrays on the message itself: NeMo-RL's and Megatron's.

``choices[].message`` has ``prompt_token_ids``, ``generation_token_ids`` and
``generation_log_probs``; a stream has them on a ``delta``. They send them unasked, and may refuse
fields that they don't know, so nothing is added to the request. The keys are not part of the chat
protocol, so they are cut out for the client rather than set to null.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from token_id_capture.records import TOKEN_FIELDS
from token_id_capture.server.engines.base import (
    ChoiceTokens,
    DeltaReader,
    Endpoint,
    StreamReader,
    array,
    choices_of,
)
from token_id_capture.server.json_splice import Hidden

_CARRIERS = ("message", "delta")


class MessageEngine:
    """Takes what the server sends on its own."""

    def request_fields(self, endpoint: Endpoint, body: Mapping[str, Any]) -> dict[str, Any]:
        """Nothing."""
        return {}

    def read_reply(self, endpoint: Endpoint, reply: Mapping[str, Any]) -> dict[int, ChoiceTokens]:
        """Read the arrays of each choice's message (or delta)."""
        found: dict[int, ChoiceTokens] = {}
        for index, choice in choices_of(reply):
            for carrier in map(choice.get, _CARRIERS):
                if isinstance(carrier, Mapping) and any(carrier.get(field) is not None for field in TOKEN_FIELDS):
                    found[index] = ChoiceTokens(
                        prompt_ids=array(carrier.get("prompt_token_ids")),
                        ids=array(carrier.get("generation_token_ids")),
                        log_probs=array(carrier.get("generation_log_probs")),
                        routed_experts=carrier.get("routed_experts"),
                    )
        return found

    def stream_reader(self, endpoint: Endpoint) -> StreamReader:
        """Deltas carry the new tokens alone, or the last one carries all."""
        return DeltaReader(lambda chunk: self.read_reply(endpoint, chunk))

    def hidden(self, endpoint: Endpoint, body: Mapping[str, Any]) -> tuple[Hidden, ...]:
        """The arrays, key and all: no client can ask for them."""
        return tuple(
            Hidden.at(f"choices.*.{carrier}.{field}", cut=True) for carrier in _CARRIERS for field in TOKEN_FIELDS
        )
