"""What travels between a gateway and its client: paths, headers, and a snapshot as bytes.

A snapshot is a sequence of frames, each a length of four bytes (big-endian) and so many bytes of MessagePack. The
first is a ``SnapshotHead``; each further one is a call, a map of the columns that the store keeps of it. So its tokens
travel once, and the digests that were made when they were captured are checked where they arrive.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from token_id_capture.errors import HandOffError
from token_id_capture.lifecycle import Flag, Outcome
from token_id_capture.server.defaults import HAND_OFF
from token_id_capture.store.read.tokens import StoredSnapshot

ROLLOUTS: Final = f"{HAND_OFF}/rollouts"
OUTCOMES: Final = f"{HAND_OFF}/outcomes"

JSON_LINES: Final = "application/jsonl"
ARROW_STREAM: Final = "application/vnd.apache.arrow.stream"
SNAPSHOT: Final = "application/vnd.token-id-capture.snapshot"

DIGEST: Final = "content-digest"
"""Of RFC 9530."""
SNAPSHOT_ID: Final = "x-tokcap-snapshot-id"
SNAPSHOT_VERSION: Final = "x-tokcap-snapshot-version"
OUTCOME: Final = "x-tokcap-outcome"
REASON: Final = "x-tokcap-reason"

MOST_LISTED: Final = 1000
"""Rollouts on one page."""

_FORMAT: Final = 1
_LENGTH: Final = struct.Struct(">I")


class Code(StrEnum):
    """The codes of errors by which a client tells them apart."""

    METHOD = "method_not_allowed"
    UNKNOWN = "unknown_rollout"
    RETIRED = "rollout_retired"
    CHANGED = "rollout_changed"
    EVIDENCE = "kept_as_evidence"
    CORRUPT = "corrupt_capture"
    INVALID = "invalid_request"
    UNAVAILABLE = "hand_off_unavailable"


Version: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""What the column of a version can hold, in a file and on a server."""


class NewOutcome(msgspec.Struct):
    """What became of a snapshot at its consumer's."""

    snapshot_id: str
    version: Version
    outcome: Outcome
    reason: str = ""
    metrics: dict[str, Any] = {}


class Acknowledgement(msgspec.Struct):
    """Which state of a rollout its consumer has, durably.

    ``delivered`` says that its rows were deliverable, whatever outcome is recorded of another build of this state.
    """

    snapshot_id: str
    version: Version
    delivered: bool = False


class SnapshotHead(msgspec.Struct):
    """A snapshot without its calls, of which there are ``calls``."""

    format: int
    rollout_id: str
    snapshot_id: str
    version: int
    flags: tuple[Flag, ...]
    calls: int


def digest_header(digest: bytes) -> str:
    """A sha256 as the value of ``Content-Digest``."""
    return f"sha-256=:{base64.b64encode(digest).decode()}:"


def encoded(snapshot: StoredSnapshot) -> Iterator[bytes]:
    """The frames of a snapshot."""
    rows = snapshot.rows
    head = SnapshotHead(_FORMAT, snapshot.rollout_id, snapshot.snapshot_id, snapshot.version, snapshot.flags, len(rows))
    encode = msgspec.msgpack.Encoder().encode
    for value in (head, *rows):
        frame = encode(value)
        yield _LENGTH.pack(len(frame))
        yield frame


def decoded(body: bytes) -> StoredSnapshot:
    """The snapshot of these frames; its calls are not checked yet.

    Raises:
        HandOffError: they are not those of a snapshot, or of a newer release.
    """
    try:
        frames = _frames(memoryview(body))
        kind = msgspec.msgpack.decode(frames[0], type=_Format)
        if kind.format != _FORMAT:
            raise HandOffError(
                f"the gateway sends snapshots in format {kind.format}, and this release reads {_FORMAT}: "
                "upgrade token-id-capture here"
            )
        head = msgspec.msgpack.decode(frames[0], type=SnapshotHead)
        rows: list[dict[str, Any]] = [msgspec.msgpack.decode(frame, type=dict[str, Any]) for frame in frames[1:]]
    except (msgspec.MsgspecError, struct.error, IndexError) as error:
        raise HandOffError(f"what the gateway sent is not a snapshot: {error}") from error
    if len(rows) != head.calls:
        raise HandOffError(f"the gateway sent {len(rows)} calls of rollout {head.rollout_id!r}, which has {head.calls}")
    return StoredSnapshot(head.rollout_id, head.snapshot_id, head.version, head.flags, rows)


class _Format(msgspec.Struct):
    """What tells how to read the rest."""

    format: int


def _frames(body: memoryview) -> list[memoryview]:
    frames = []
    position = 0
    while position < len(body):
        (length,) = _LENGTH.unpack_from(body, position)
        position += _LENGTH.size
        frames.append(body[position : position + length])
        position += length
    return frames


def sha256(body: bytes) -> bytes:
    """Its digest."""
    return hashlib.sha256(body).digest()
