"""A span as bytes: the messages of OTLP (opentelemetry-proto, trace/v1/trace.proto), in protobuf's wire format."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from functools import lru_cache
from struct import Struct
from typing import Final, NamedTuple

from yarl import URL

OPERATION: Final = "chat"
_SCOPE: Final = "token_id_capture"
_REMOTE_PARENT: Final = 0x301
"""Sampled; and the parent, which stands for the rollout, is known to be of no span of this process."""
_CLIENT: Final = 3
_ERROR: Final = 2

_IDS: Final = Struct("<2s16s2s8s")
_TIMES: Final = Struct("<BQBQ")
_FLAGS: Final = Struct("<2sI")
_SHORT: Final = [bytes([number]) for number in range(0x80)]


class EndedCall(NamedTuple):
    """What the span of a call says. ``trace`` is ``trace_head`` of its rollout; times are nanoseconds of the epoch."""

    trace: bytes
    model_call_id: str
    begun: int
    ended: int
    agent: str | None
    error: str
    prompt: int = -1
    sampled: int = 0
    model: str = ""
    response_id: str | None = None
    upstream: str | None = None
    finish_reason: str | None = None


def trace_head(trace_id: bytes, parent_id: bytes, rollout_id: str) -> bytes:
    """The fields that all spans of a rollout share: 16 and 8 bytes of ids, and the rollout as conversation."""
    ids = _IDS.pack(b"\x0a\x10", trace_id, b"\x22\x08", parent_id)
    kind = b"\x30%c" % _CLIENT
    shared = _text("gen_ai.operation.name", OPERATION) + _text("gen_ai.conversation.id", rollout_id)
    return ids + kind + _FLAGS.pack(b"\x85\x01", _REMOTE_PARENT) + shared


def resource_head(attributes: Mapping[str, object]) -> bytes:
    """The resource, which describes the process, with values as text."""
    return _sized(0x0A, b"".join([_attribute(0x0A, name, _string(str(it))) for name, it in attributes.items()]))


def request(resource: bytes, calls: Iterable[EndedCall]) -> bytes:
    """An ``ExportTraceServiceRequest`` with a span of each call; ``resource`` is what ``resource_head`` made."""
    scope = _sized(0x0A, _string(_SCOPE))
    spans = b"".join([_sized(0x12, _span(call)) for call in calls])
    return _sized(0x0A, resource + _sized(0x12, scope + spans))


def _span(call: EndedCall) -> bytes:
    pieces = [
        call.trace,
        b"\x12\x08",
        random.randbytes(8),
        _TIMES.pack(0x39, call.begun, 0x41, call.ended),
        _name(call.model),
        _text("tokcap.model_call_id", call.model_call_id),
    ]
    if call.prompt >= 0:
        pieces.append(_count("gen_ai.usage.input_tokens", call.prompt))
        pieces.append(_count("gen_ai.usage.output_tokens", call.sampled))
    if call.response_id is not None:
        pieces.append(_text("gen_ai.response.id", call.response_id))
    if call.upstream is not None:
        pieces.append(_server(call.upstream))
    if call.finish_reason is not None:
        pieces.append(_finish_reason(call.finish_reason))
    if call.agent is not None:
        pieces.append(_text("gen_ai.agent.name", call.agent))
    if call.error:
        pieces.append(_text("error.type", call.error))
        pieces.append(_sized(0x7A, _sized(0x12, _utf8(call.error)) + b"\x18%c" % _ERROR))
    return b"".join(pieces)


# Values of which there are few are written once


@lru_cache(maxsize=1024)
def _name(model: str) -> bytes:
    if not model:
        return _sized(0x2A, _utf8(OPERATION))
    named = _sized(0x2A, _utf8(f"{OPERATION} {model}"))
    return named + _text("gen_ai.request.model", model) + _text("gen_ai.response.model", model)


@lru_cache(maxsize=1024)
def _server(upstream: str) -> bytes:
    """Host and port of its URL, and nothing else that a URL can hold."""
    url = URL(upstream)
    return _text("server.address", url.host or "") + _count("server.port", url.port or 0)


@lru_cache(maxsize=64)
def _finish_reason(reason: str) -> bytes:
    values = _sized(0x0A, _string(reason))
    return _attribute(0x4A, "gen_ai.response.finish_reasons", _sized(0x2A, values))


# Protobuf: a field is its tag, the length of what follows where it has no fixed one, and the value


def _text(key: str, value: str) -> bytes:
    return _attribute(0x4A, key, _string(value))


def _count(key: str, value: int) -> bytes:
    return _attribute(0x4A, key, b"\x18" + _varint(value))


def _attribute(tag: int, key: str, value: bytes) -> bytes:
    return _sized(tag, b"%b\x12%b%b" % (_key(key), _varint(len(value)), value))


@lru_cache(maxsize=128)
def _key(key: str) -> bytes:
    return _sized(0x0A, _utf8(key))


def _string(value: str) -> bytes:
    return _sized(0x0A, _utf8(value))


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _sized(tag: int, raw: bytes) -> bytes:
    return b"%c%b%b" % (tag, _varint(len(raw)), raw)


def _varint(number: int) -> bytes:
    if number < 0x80:
        return _SHORT[number]
    written = bytearray()
    while number >= 0x80:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)
