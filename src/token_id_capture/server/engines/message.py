"""Servers that put the token arrays on the message itself: NeMo-RL's and Megatron's.

``choices[].message`` has ``prompt_token_ids``, ``generation_token_ids`` and
``generation_log_probs``; a stream has them on a ``delta``. They send them unasked, and may refuse
fields that they don't know, so nothing is added to the request. The keys are not part of the chat
protocol, so they are cut out for the client rather than set to null.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from token_id_capture.records import TOKEN_ARRAYS, TOKEN_FIELDS
from token_id_capture.server.engines.base import (
    OPENAI_PATHS,
    ChoiceTokens,
    DeltaReader,
    Endpoint,
    Reader,
    array,
    choices_of,
    unwrapped,
)
from token_id_capture.server.engines.continuing import JsonIds, deciding_field
from token_id_capture.server.text.json_splice import Hidden

_CARRIERS: Final = ("message", "delta")


class MessageEngine:
    """Takes what the server sends on its own."""

    paths: Mapping[str, Endpoint] = OPENAI_PATHS

    def can_stream(self, endpoint: Endpoint, body: Mapping[str, Any]) -> bool:
        """Deltas carry the new tokens alone, or the last one carries all."""
        return True

    def request_fields(self, endpoint: Endpoint, body: Mapping[str, Any]) -> dict[str, Any]:
        """Nothing."""
        return {}

    def prefix_fields(self, known: JsonIds) -> dict[str, Any]:
        """The field of NeMo-RL's and NeMo Gym's servers, which put their rendering of what follows behind it."""
        return {"required_prefix_token_ids": known}

    def prompt_field_of(self, body: Mapping[str, Any]) -> str | None:
        """A client may supply its own prefix."""
        return deciding_field(body, "required_prefix_token_ids")

    def reader(self, endpoint: Endpoint, body: Mapping[str, Any]) -> Reader:
        """Reads the arrays of each choice's message or delta."""
        return DeltaReader(_of_part)

    def hidden(self, endpoint: Endpoint, body: Mapping[str, Any]) -> tuple[Hidden, ...]:
        """The arrays, key and all: no client can ask for them."""
        return tuple(
            Hidden.at(f"choices.*.{carrier}.{field}", cut=True) for carrier in _CARRIERS for field in TOKEN_FIELDS
        )


def _of_part(part: Mapping[str, Any]) -> dict[int, ChoiceTokens]:
    found: dict[int, ChoiceTokens] = {}
    for index, choice in choices_of(part):
        for carrier in map(choice.get, _CARRIERS):
            fields = unwrapped(carrier) if isinstance(carrier, Mapping) else {}
            if any(fields.get(field) is not None for field in TOKEN_ARRAYS):
                found[index] = ChoiceTokens(
                    prompt_ids=array(fields.get("prompt_token_ids")),
                    ids=array(fields.get("generation_token_ids")),
                    log_probs=array(fields.get("generation_log_probs")),
                    routed_experts=fields.get("routed_experts"),
                )
    return found
