"""Between a ``TokenEntry`` and a row of ``entries`` or ``snapshot_entries``.

A prompt that continues an earlier call is stored without the part that the call accounts for, so a
rollout of T turns takes space for its distinct tokens and not for T prompts. Reading joins the
parts again and checks the digest of the whole sequence. Both directions touch each distinct token
once: a running sha256 is copied from a call to those that continue it, and all calls of a chain
are views of one buffer.
"""

from __future__ import annotations

import hashlib
import struct
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from token_id_capture.errors import InvalidEntryError
from token_id_capture.lifecycle import ORIGIN_FIELDS
from token_id_capture.records import TOKEN_ENTRY_RECORD_SCHEMA_VERSION, TokenEntry
from token_id_capture.store.sequence_walk import SequenceWalk, damaged
from token_id_capture.tokens import LogProbs, TokenIds

if TYPE_CHECKING:
    from hashlib import _Hash

_TOLD = (*ORIGIN_FIELDS, "upstream")
"""Columns that are null where nobody told; they are in the digest of a record only where somebody did."""

_STORED_IN_COLUMNS = {
    *("schema_version", "rollout_id", "model_call_id", "model", "finish_reason", "created_at"),
    *("prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts"),
    *("output_items", "token_item_index"),
    *_TOLD,
}
WRITE_BYTES = 1024
"""What a write takes beside its content, in bytes."""

_LENGTHS = struct.Struct("<5Q")

UNREADABLE = (AttributeError, TypeError, ValueError, zlib.error)
"""What a damaged column may raise where it is decoded."""

PAYLOAD_MISMATCH = "its log probabilities or its content do not match the digest stored with them"
_EXTRA_FIELDS = tuple(name for name in TokenEntry.model_fields if name not in _STORED_IN_COLUMNS)


@dataclass(slots=True)
class KnownSequence:
    """A stored call's prompt and generation, their ``length`` together, and the sha256 that has read both."""

    model_call_id: str
    prompt: TokenIds
    generation: TokenIds
    digest_state: _Hash
    length: int

    def is_prefix_of(self, prompt: TokenIds) -> bool:
        """Whether ``prompt`` starts with this call's prompt and generation, token for token."""
        return prompt.startswith(self.prompt, self.generation)


@dataclass(slots=True)
class PackedEntry:
    """An entry as it goes to the writer: validated, hashed and in bytes."""

    rollout_id: str
    model_call_id: str
    prompt: TokenIds
    generation: TokenIds
    digest_state: _Hash
    prefix_call_id: str | None
    prefix_length: int
    columns: dict[str, Any]

    @property
    def size(self) -> int:
        """Bytes of content that the entry holds on to while it waits."""
        texts = len(self.columns["content"]) + len(self.columns["extras"]) + len(self.columns["routed_experts"] or b"")
        return 4 * (len(self.prompt) - self.prefix_length) + 12 * len(self.generation) + texts

    def row(self, stored_at: float, writer_id: str, begun_at: float | None = None) -> dict[str, Any]:
        """The values of the row's columns."""
        return {
            **self.columns,
            "begun_at": begun_at,
            "stored_at": stored_at,
            "writer_id": writer_id,
            "prefix_call_id": self.prefix_call_id,
            "prefix_length": self.prefix_length,
            "prompt_suffix": self.prompt[self.prefix_length :].tobytes(),
        }


def validated(entry: TokenEntry) -> TokenEntry:
    """The entry as it may be stored.

    Raises:
        TypeError: it is none.
        InvalidEntryError: it was changed into something that is none.
    """
    # model_copy(update=...) and assignments go past validation; what they leave must not be stored.
    if not isinstance(entry, TokenEntry):
        raise TypeError(f"put takes a TokenEntry, not {type(entry).__name__}")
    if entry.is_sound():
        return entry
    try:
        return TokenEntry.model_validate(dict(entry))
    except ValueError as error:
        raise InvalidEntryError(
            f"call {entry.model_call_id!r} of rollout {entry.rollout_id!r} cannot be stored: {error}"
        ) from error


def pack(entry: TokenEntry, known: KnownSequence | None = None) -> PackedEntry:
    """Make an entry ready to store; ``known`` is the stored call that its prompt continues, if any.

    Raises:
        InvalidEntryError: an extra field, an output item or the routed experts are no JSON.
    """
    prompt, generation = entry.prompt_token_ids, entry.generation_token_ids
    prompt_length, generation_length = len(prompt), len(generation)
    prefix_length = known.length if known is not None else 0
    state = known.digest_state.copy() if known is not None else hashlib.sha256()
    state.update(_little_endian(prompt[prefix_length:]))
    state.update(_little_endian(generation))
    sequence_digest = state.digest()
    log_probs = entry.generation_log_probs.tobytes()
    content = _json(entry, {"output_items": entry.output_items, "token_item_index": entry.token_item_index})
    extras = _json(entry, _extras(entry))
    experts = None if entry.routed_experts is None else _json(entry, entry.routed_experts)
    # Adding 0 makes a negative zero positive, which is how SQLite gives it back.
    created_at = entry.created_at + 0.0
    told = {name: getattr(entry, name) for name in _TOLD}
    head = _head([entry.schema_version, entry.model, entry.finish_reason, created_at, prompt_length], told)
    return PackedEntry(
        rollout_id=entry.rollout_id,
        model_call_id=entry.model_call_id,
        prompt=prompt,
        generation=generation,
        digest_state=state,
        prefix_call_id=known.model_call_id if known is not None else None,
        prefix_length=prefix_length,
        columns={
            "rollout_id": entry.rollout_id,
            "model_call_id": entry.model_call_id,
            "payload_digest": _payload_digest(sequence_digest, head, content, extras, experts or b"", log_probs),
            "sequence_digest": sequence_digest,
            "prompt_length": prompt_length,
            "generation_length": generation_length,
            "sequence_length": prompt_length + generation_length,
            "schema_version": entry.schema_version,
            "model": entry.model,
            "finish_reason": entry.finish_reason,
            "created_at": created_at,
            "content": content.decode(),
            "extras": extras.decode(),
            "generation": generation.tobytes(),
            "log_probs": log_probs,
            "routed_experts": None if experts is None else zlib.compress(experts, 1),
            **told,
        },
    )


def stored_payload_digest(row: Mapping[str, Any]) -> bytes:
    """The payload digest that ``pack`` gave a row, computed again from what the row holds now.

    Raises:
        zlib.error: the routed experts cannot be decompressed.
    """
    fields = ("schema_version", "model", "finish_reason", "created_at", "prompt_length")
    experts = row["routed_experts"]
    return _payload_digest(
        row["sequence_digest"],
        _head([row[name] for name in fields], {name: row[name] for name in _TOLD}),
        row["content"].encode(),
        row["extras"].encode(),
        b"" if experts is None else zlib.decompress(experts),
        row["log_probs"],
    )


def _head(members: list[Any], origin: Mapping[str, Any]) -> bytes:
    """The small members of a record for its digest. One that tells no origin has the digest that it always had."""
    told = {name: value for name, value in origin.items() if value is not None}
    if "offers_tools" in told:
        told["offers_tools"] = bool(told["offers_tools"])  # SQLite gives a number back
    return orjson.dumps([*members, told] if told else members)


def _payload_digest(sequence_digest: bytes, *parts: bytes) -> bytes:
    lengths = _LENGTHS.pack(*map(len, parts))
    return hashlib.sha256(b"".join((sequence_digest, lengths, *parts))).digest()


def longest_prefix(prompt: TokenIds, candidates: Sequence[tuple[str, int, bytes]]) -> tuple[str, int] | None:
    """The candidate with the longest sequence that ``prompt`` starts with, by digest.

    A candidate is (call id, sequence length in tokens, sequence digest). The prompt is read once,
    however many candidates there are.
    """
    found: tuple[str, int] | None = None
    state, position = hashlib.sha256(), 0
    for model_call_id, length, digest in sorted(candidates, key=lambda candidate: candidate[1]):
        if not 0 < length <= len(prompt):
            continue
        state.update(_little_endian(prompt[position:length]))
        position = length
        if state.copy().digest() == digest:
            found = (model_call_id, length)
    return found


def unpack_rollout(rollout_id: str, rows: Iterable[Mapping[str, Any]]) -> tuple[TokenEntry, ...]:
    """The entries of one rollout's rows, in the rows' order.

    Raises:
        CorruptCaptureError: a prefix pointer leads nowhere, tokens, log probabilities or content do
            not match their digests, or cannot be read; the message names the call.
        InvalidEntryError: a record is newer than this release.
    """
    rows = list(rows)
    for row in rows:
        _refuse_newer(rollout_id, row)
    for row in rows:
        _check_payload(rollout_id, row)
    sequences = _Sequences(rollout_id, {row["model_call_id"]: row for row in rows})
    entries = []
    for row in rows:
        try:
            entries.append(_unpack(rollout_id, row, *sequences.of(row["model_call_id"])))
        except ValueError as error:
            raise damaged(rollout_id, row["model_call_id"], f"its content cannot be read ({error})") from error
    return tuple(entries)


def _check_payload(rollout_id: str, row: Mapping[str, Any]) -> None:
    """SQLite's pages have no checksum, so a changed byte on the disk is seen here or never."""
    try:
        digest = stored_payload_digest(row)
    except UNREADABLE as error:
        raise damaged(rollout_id, row["model_call_id"], f"its content cannot be read ({error})") from error
    if digest != row["payload_digest"]:
        raise damaged(rollout_id, row["model_call_id"], PAYLOAD_MISMATCH)


def _unpack(rollout_id: str, row: Mapping[str, Any], prompt: TokenIds, generation: TokenIds) -> TokenEntry:
    fields = {
        **orjson.loads(row["extras"]),
        **orjson.loads(row["content"]),
        "schema_version": row["schema_version"],
        "rollout_id": rollout_id,
        "model_call_id": row["model_call_id"],
        "model": row["model"],
        "finish_reason": row["finish_reason"],
        "created_at": row["created_at"],
        "prompt_token_ids": prompt,
        "generation_token_ids": generation,
        "generation_log_probs": LogProbs.from_bytes(row["log_probs"]),
    }
    fields.update((name, row[name]) for name in _TOLD if row[name] is not None)
    if row["routed_experts"] is not None:
        fields["routed_experts"] = orjson.loads(zlib.decompress(row["routed_experts"]))
    return TokenEntry.model_validate(fields)


def _refuse_newer(rollout_id: str, row: Mapping[str, Any]) -> None:
    if row["schema_version"] > TOKEN_ENTRY_RECORD_SCHEMA_VERSION:
        raise InvalidEntryError(
            f"call {row['model_call_id']!r} of rollout {rollout_id!r} is a record of version "
            f"{row['schema_version']}, and this release reads up to {TOKEN_ENTRY_RECORD_SCHEMA_VERSION}: "
            "upgrade token-id-capture"
        )


class _Sequences:
    """Joins the stored parts of a rollout's calls, and checks them."""

    def __init__(self, rollout_id: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
        self._rollout_id = rollout_id
        self._rows = rows
        self._parts: dict[str, tuple[TokenIds, TokenIds]] = {}
        self._check_digests()
        # Longest first: a chain's last call lays the buffer that its earlier calls are views of.
        for call_id in sorted(rows, key=lambda call_id: -rows[call_id]["sequence_length"]):
            if call_id not in self._parts:
                self._lay(call_id)

    def of(self, call_id: str) -> tuple[TokenIds, TokenIds]:
        """The prompt and the generation of a call."""
        return self._parts[call_id]

    def _lay(self, call_id: str) -> None:
        path: list[str] = []
        current: str | None = call_id
        while current is not None and current not in self._parts:
            path.append(current)
            current = self._rows[current]["prefix_call_id"]
        if current is None:
            self._lay_chain(path)
        else:
            self._lay_branch(current, path)

    def _lay_chain(self, path: list[str]) -> None:
        pieces: list[bytes] = []
        for step in reversed(path):
            pieces += (self._rows[step]["prompt_suffix"], self._rows[step]["generation"])
        whole = TokenIds.from_bytes(b"".join(pieces))
        for step in path:
            middle, end = self._rows[step]["prompt_length"], self._rows[step]["sequence_length"]
            self._parts[step] = whole[:middle], whole[middle:end]

    def _lay_branch(self, stem: str, path: list[str]) -> None:
        # A branch, such as a retry that nobody continued, shares its stem's buffer and is copied
        # only if somebody reads its prompt: with many branches the copies would add up.
        prefix = TokenIds.joined(*self._parts[stem])
        for step in reversed(path):
            suffix, generation = self._rows[step]["prompt_suffix"], self._rows[step]["generation"]
            parts = TokenIds.joined(prefix, TokenIds.from_bytes(suffix)), TokenIds.from_bytes(generation)
            self._parts[step] = parts
            prefix = TokenIds.joined(*parts)

    def _check_digests(self) -> None:
        walk = SequenceWalk()
        for call_id, row in sorted(self._rows.items(), key=lambda item: item[1]["prompt_length"]):
            if problem := walk.problem(row):
                raise damaged(self._rollout_id, call_id, problem)


def _little_endian(tokens: TokenIds) -> bytes | memoryview:
    return tokens.buffer() if _NATIVE_IS_LITTLE else tokens.tobytes()


_NATIVE_IS_LITTLE = sys.byteorder == "little"


def _extras(entry: TokenEntry) -> dict[str, Any]:
    extras = {name: value for name in _EXTRA_FIELDS if (value := getattr(entry, name)) is not None}
    if entry.model_extra:
        extras.update(entry.model_extra)
    return extras


def _json(entry: TokenEntry, value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError as error:
        raise InvalidEntryError(
            f"call {entry.model_call_id!r} of rollout {entry.rollout_id!r} holds a value that is not JSON: {error}"
        ) from error
