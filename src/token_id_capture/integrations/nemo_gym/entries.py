"""Between an entry of NeMo Gym's own class and ours.

Whatever class an entry has, its fields count. Fields that we do not know, such as the lineage that
Gym stamps, are kept as they came, so what is read is what was put.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from token_id_capture.errors import InvalidEntryError
from token_id_capture.records import TokenEntry
from token_id_capture.tokens import TokenIds

if TYPE_CHECKING:
    from nemo_gym.token_id_capture.records import TokenEntry as GymEntry

IS_DELTA: Final = "prompt_is_delta"
"""Gym's field that says that ``prompt_token_ids`` holds only what follows the parent's sequence."""

FINGERPRINT: Final = "continuation_fingerprint"
"""Gym's field with the key under which a later request finds the call."""

_PARENT: Final = "parent_call_id"
_LINEAGE: Final = "digest"


class Dumped(Protocol):
    """Any pydantic model."""

    def model_dump(self) -> dict[str, Any]:
        """The fields by name."""


def to_entry(entry: Dumped | TokenEntry) -> TokenEntry:
    """The same record as one of our class.

    Raises:
        ValueError: a field is missing or malformed.
    """
    if isinstance(entry, TokenEntry):
        return entry
    return TokenEntry.model_validate(entry.model_dump())


def is_delta(entry: TokenEntry) -> bool:
    """Whether the prompt is only the part that follows the parent's prompt and generation."""
    return bool(extra(entry, IS_DELTA))


def extra(entry: TokenEntry, name: str) -> Any:
    """A field that Gym added to the record; None if it has none of this name."""
    return (entry.model_extra or {}).get(name)


def parent_of(entry: TokenEntry) -> str | None:
    """The call that Gym resolved as this one's parent."""
    named = extra(entry, _PARENT)
    return named if isinstance(named, str) and named else None


def has_lineage(entry: TokenEntry) -> bool:
    """Whether the entry came from Gym, whose entries have the lineage fields even where they are empty."""
    return _LINEAGE in (entry.model_extra or {})


def whole(entry: TokenEntry, parent: TokenEntry) -> TokenEntry:
    """A delta record with its prompt laid out in full behind that of its ``parent``.

    Raises:
        InvalidEntryError: the sequence does not match the digest that the record carries.
    """
    before = TokenIds.joined(parent.prompt_token_ids, parent.generation_token_ids)
    prompt = TokenIds.joined(before, entry.prompt_token_ids)
    laid_out = entry.model_copy(update={"prompt_token_ids": prompt})
    expected = extra(entry, _LINEAGE)
    if expected and digest_of(laid_out) != expected:
        raise InvalidEntryError(
            f"call {entry.model_call_id!r} of rollout {entry.rollout_id!r} continues call {parent.model_call_id!r}, "
            "but their tokens together do not match the digest of the record"
        )
    return laid_out


def digest_of(entry: TokenEntry) -> str:
    """Gym's digest (``records.compute_digest``, version 1) of the prompt and the generation.

    SHA-256 over a domain, a version byte, and the count and ids as big-endian u64; of nothing, over the
    domain alone.
    """
    tokens = TokenIds.joined(entry.prompt_token_ids, entry.generation_token_ids).tolist()
    counted = struct.pack(f">BQ{len(tokens)}Q", 1, len(tokens), *tokens) if tokens else b""
    return hashlib.sha256(b"nemo-gym-tokens" + counted).hexdigest()


def to_gym(entry: TokenEntry, stamp: Mapping[str, Any], parent: TokenEntry | None = None) -> GymEntry:
    """The record as an entry of the installed Gym, with what Gym put and nothing of ours.

    ``stamp`` holds lineage fields for an entry that has none; ``parent`` is needed for delta records.
    """
    from nemo_gym.token_id_capture.records import TokenEntry as GymEntry

    fields = entry.model_dump(mode="json")
    known = GymEntry.model_fields
    ours = TokenEntry.model_fields
    # A field that is only ours and was never set would come back as one that nobody put.
    kept = {name: value for name, value in fields.items() if name in known or name not in ours or value is not None}
    kept.update(stamp)
    if is_delta(entry) and parent is not None:
        known_length = len(parent.prompt_token_ids) + len(parent.generation_token_ids)
        kept["prompt_token_ids"] = fields["prompt_token_ids"][known_length:]
    return GymEntry.model_validate(kept)
