"""The record of one model call, and how it is read out of a served response.

Two shapes of response carry token arrays: the OpenAI Responses shape (on items of ``output``) and
the chat shape (on ``choices[*].message``). Exactly one item may carry them, and it must carry all
three arrays: a partial carrier means that something was lost on the way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from token_id_capture.errors import InvalidEntryError
from token_id_capture.lifecycle import CallOrigin, Purpose
from token_id_capture.provenance import Continuity, Translation
from token_id_capture.tokens import LogProbs, TokenIds

TOKEN_ENTRY_RECORD_SCHEMA_VERSION: Final = 1
"""The newest ``TokenEntry.schema_version`` that this release reads and the one that it writes."""

TOKEN_ARRAYS: Final = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
TOKEN_FIELDS: Final = (*TOKEN_ARRAYS, "routed_experts")
"""The fields that a model server may put on a response item, and that content items never hold."""

ROLLOUT_ID_MAX_LENGTH: Final = 200
MODEL_CALL_ID_MAX_LENGTH: Final = 200
AGENT_MAX_LENGTH: Final = 200
_ROLLOUT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ID_RULE: Final = (
    f"use letters, digits, '.', '_' and '-', starting with a letter or digit, at most {ROLLOUT_ID_MAX_LENGTH} "
    f"characters"
)


def media_of(entry: TokenEntry) -> tuple[str, ...]:
    """The digests of the images, sounds and files in the prompt, in order; the field ``media_digests``.

    Their placeholders are alike, so token ids alone do not say what the policy saw.
    """
    extra = entry.model_extra
    digests = extra.get("media_digests") if extra else None
    return tuple(map(str, digests)) if isinstance(digests, list | tuple) else ()


def validate_rollout_id(rollout_id: str) -> str:
    """Return ``rollout_id`` unchanged if it is one. Never repair it: nobody would look it up under another name.

    Raises:
        ValueError: it does not match ``^[A-Za-z0-9][A-Za-z0-9._-]*$`` or has more than 200 characters.
    """
    if not is_rollout_id(rollout_id):
        shown = repr(rollout_id)
        raise ValueError(f"invalid rollout id {shown if len(shown) <= 80 else shown[:77] + '...'}: {_ID_RULE}")
    return rollout_id


def is_rollout_id(value: object) -> bool:
    """Whether ``validate_rollout_id`` would return it."""
    return isinstance(value, str) and len(value) <= ROLLOUT_ID_MAX_LENGTH and _is_id(value)


@lru_cache(maxsize=1024)
def _is_id(text: str) -> bool:
    """Cached, as the id of a call's rollout is looked at five times on its way."""
    return _ROLLOUT_ID.fullmatch(text) is not None


def validate_agent(name: str) -> str:
    """Return the name of an agent that a path names, if it is written as rollout ids are.

    Raises:
        ValueError: it is not.
    """
    if not is_rollout_id(name):
        raise ValueError(f"invalid agent name: {_ID_RULE}")
    return name


def rollout_id_from_record(record: Mapping[str, Any]) -> str | None:
    """The rollout id that a request body or a finished rollout record carries.

    ``_ng_rollout_id`` wins; else ``{_ng_task_index}-{_ng_rollout_index}`` if both exist. An
    ``_ng_attempt_index`` above 0 appends ``-a{n}`` to either. ``None``: the record names no rollout.

    Raises:
        ValueError: an id or index is there but malformed.
    """
    explicit = record.get("_ng_rollout_id")
    task, rollout = record.get("_ng_task_index"), record.get("_ng_rollout_index")
    if explicit is not None:
        rollout_id = validate_rollout_id(explicit)
    elif task is not None and rollout is not None:
        rollout_id = f"{_index('_ng_task_index', task)}-{_index('_ng_rollout_index', rollout)}"
    else:
        return None
    attempt = record.get("_ng_attempt_index")
    if attempt is not None and _index("_ng_attempt_index", attempt) > 0:
        rollout_id = f"{rollout_id}-a{attempt}"
    return validate_rollout_id(rollout_id)


def _index(field: str, value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{field} must be an integer of at least 0, not {value!r}")
    return value


class TokenEntry(BaseModel):
    """What the policy read and sampled in one model call. Unknown fields are kept.

    ``prompt_token_ids`` has P ids, ``generation_token_ids`` and ``generation_log_probs`` have G
    items each; ``output_items`` is the content that was generated, without token arrays, and
    ``token_item_index`` the item of it that the arrays belong to. ``created_at`` is in seconds
    since the epoch. ``agent``, ``parent_agent``, ``purpose`` and ``offers_tools`` are those of ``CallOrigin``.
    ``upstream`` is the address of the engine that served the call.

    Raises:
        pydantic.ValidationError (a ValueError): it names the field that is wrong.
    """

    model_config = ConfigDict(extra="allow")

    schema_version: int = TOKEN_ENTRY_RECORD_SCHEMA_VERSION
    rollout_id: str
    model_call_id: str = Field(min_length=1, max_length=MODEL_CALL_ID_MAX_LENGTH)
    model: str = ""
    prompt_token_ids: TokenIds
    generation_token_ids: TokenIds
    generation_log_probs: LogProbs
    routed_experts: Any = None
    output_items: list[dict[str, Any]] = Field(default_factory=list)
    token_item_index: int | None = None
    created_at: float = Field(default=0.0, allow_inf_nan=False)
    response_id: str | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    weight_version: str | None = None
    sampling: dict[str, Any] | None = None
    log_probs_mode: str | None = None
    continuity: Continuity | None = None
    translation: Translation | None = None
    agent: str | None = Field(default=None, min_length=1, max_length=AGENT_MAX_LENGTH)
    parent_agent: str | None = Field(default=None, min_length=1, max_length=AGENT_MAX_LENGTH)
    purpose: Purpose | None = None
    offers_tools: bool | None = None
    upstream: str | None = None

    @field_validator("schema_version")
    @classmethod
    def _known_version(cls, version: int) -> int:
        if not 1 <= version <= TOKEN_ENTRY_RECORD_SCHEMA_VERSION:
            raise ValueError(
                f"this release reads records up to version {TOKEN_ENTRY_RECORD_SCHEMA_VERSION}, not {version}: "
                "upgrade token-id-capture"
            )
        return version

    @field_validator("rollout_id")
    @classmethod
    def _valid_rollout_id(cls, rollout_id: str) -> str:
        return validate_rollout_id(rollout_id)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        ids, log_probs = len(self.generation_token_ids), len(self.generation_log_probs)
        if ids != log_probs:
            raise ValueError(
                f"generation_token_ids and generation_log_probs must have the same length, not {ids} and {log_probs}"
            )
        index = self.token_item_index
        if index is not None and not 0 <= index < len(self.output_items):
            raise ValueError(f"token_item_index {index} is outside output_items, which has {len(self.output_items)}")
        return self

    @property
    def origin(self) -> CallOrigin:
        """Whose call it is."""
        return CallOrigin(self.agent, self.parent_agent, self.purpose, self.offers_tools)

    def is_sound(self) -> bool:
        """Whether validation would change or refuse nothing of what a store relies on.

        Far cheaper than validating again; it says no to whatever it does not know.
        """
        index, items = self.token_item_index, self.output_items
        return (
            type(self.prompt_token_ids) is TokenIds
            and type(self.generation_token_ids) is TokenIds
            and type(self.generation_log_probs) is LogProbs
            and len(self.generation_token_ids) == len(self.generation_log_probs)
            and self.schema_version == TOKEN_ENTRY_RECORD_SCHEMA_VERSION
            and type(self.schema_version) is int
            and is_rollout_id(self.rollout_id)
            and type(self.model_call_id) is str
            and 1 <= len(self.model_call_id) <= MODEL_CALL_ID_MAX_LENGTH
            and type(self.model) is str
            and (self.finish_reason is None or type(self.finish_reason) is str)
            and type(self.created_at) is float
            and math.isfinite(self.created_at)
            and type(items) is list
            and (index is None or (type(index) is int and 0 <= index < len(items)))
            and _is_agent(self.agent)
            and _is_agent(self.parent_agent)
            and (self.purpose is None or type(self.purpose) is Purpose)
            and (self.offers_tools is None or type(self.offers_tools) is bool)
            and (self.upstream is None or type(self.upstream) is str)
        )


def _is_agent(value: object) -> bool:
    return value is None or (type(value) is str and 1 <= len(value) <= AGENT_MAX_LENGTH)


def choice_call_id(model_call_id: str, position: int) -> str:
    """The id under which a choice of a call is stored: the first has the call's own, the others add their position."""
    return f"{model_call_id}.{position}" if position else model_call_id


def call_of_choice(model_call_id: str) -> str:
    """The call that a choice would belong to, were this the id of one; ask only where that call is known."""
    call_id, dot, position = model_call_id.rpartition(".")
    return call_id if dot and position.isdecimal() else model_call_id


def extract_token_fields(response: Mapping[str, Any]) -> dict[str, Any] | None:
    """The token arrays of a complete response: a dict with the keys of ``TOKEN_FIELDS``, or None.

    Raises:
        InvalidEntryError: several items carry arrays, or one carries only some of the three.
    """
    carriers = [item for item in _items(response) if any(item.get(field) is not None for field in TOKEN_ARRAYS)]
    if not carriers:
        return None
    if len(carriers) > 1:
        raise InvalidEntryError(f"multiple response items ({len(carriers)}) carry token arrays; one call has one")
    carrier = carriers[0]
    missing = [field for field in TOKEN_ARRAYS if carrier.get(field) is None]
    if missing:
        raise InvalidEntryError(f"the response item that carries token arrays lacks {', '.join(missing)}")
    return {field: carrier.get(field) for field in TOKEN_FIELDS}


def response_to_output_items(response: Mapping[str, Any]) -> tuple[list[dict[str, Any]], int | None]:
    """The content items of a response without token arrays, and the index of their carrier.

    Chat messages become items ``{"type": "message", ...}`` with the rest of the message as it is;
    tool-call arguments stay exactly the text that was produced.
    """
    items = list(_items(response))
    carrier = next(
        (index for index, item in enumerate(items) if any(item.get(field) is not None for field in TOKEN_ARRAYS)),
        None,
    )
    stripped = [strip_token_fields(item) for item in items]
    return [item if "type" in item else {"type": "message", **item} for item in stripped], carrier


def strip_token_fields(item: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a response item without the fields of ``TOKEN_FIELDS``."""
    return {key: value for key, value in item.items() if key not in TOKEN_FIELDS}


def _items(response: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    output = response.get("output")
    if isinstance(output, list):
        yield from (item for item in output if isinstance(item, Mapping))
    choices = response.get("choices")
    if isinstance(choices, list):
        for choice in choices:
            message = choice.get("message") if isinstance(choice, Mapping) else None
            if isinstance(message, Mapping):
                yield message
