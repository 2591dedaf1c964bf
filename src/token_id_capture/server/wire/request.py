"""The body of a captured request, and what is sent to the engine in its place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any, Final

import orjson

from token_id_capture.server.defaults import Streaming
from token_id_capture.server.engines.base import Endpoint, Engine
from token_id_capture.server.text.json_splice import set_members
from token_id_capture.server.wire.endpoints import expected_choices

_MEDIA: Final = frozenset(
    {"audio_data", "features", "image_data", "input_embeds", "multi_modal_data", "multimodal_data", "prompt_embeds"}
    | {"video_data"}
)
_MEDIA_WORD: Final = re.compile("image|audio|video|file|document")
_TRUE: Final = (True, "true", "True", "1")  # as engines that validate with pydantic read it


class CallBody:
    """A generation request: the client's object, and the engine's bytes made from it."""

    def __init__(self, endpoint: Endpoint, members: Mapping[str, Any]) -> None:
        self.endpoint = endpoint
        self.members = members
        self.expected_choices = expected_choices(endpoint, members)
        self.streams = members.get("stream") in _TRUE
        self.stream_upstream = self.streams

    @classmethod
    def parse(cls, endpoint: Endpoint, raw: bytes) -> CallBody | None:
        """Read a body; None if it is not a JSON object, which is for the engine to complain about."""
        try:
            members = orjson.loads(raw)
        except orjson.JSONDecodeError:
            # Engines in Python also take what only the standard library takes: NaN, lone
            # surrogates, UTF-16. What they would answer must be captured.
            try:
                members = json.loads(raw)
            except (ValueError, RecursionError):
                return None
        return cls(endpoint, members) if isinstance(members, dict) else None

    @property
    def model(self) -> str:
        """The model that was asked for; empty if the request names none."""
        model = self.members.get("model")
        return model if isinstance(model, str) else ""

    @property
    def offers_tools(self) -> bool | None:
        """Whether the model may call a tool; None where the endpoint knows no tools."""
        return bool(self.members.get("tools")) if self.endpoint is Endpoint.CHAT else None

    @property
    def asks_usage(self) -> bool:
        """Whether the client wants the chunk that tells the usage."""
        options = self.members.get("stream_options")
        return isinstance(options, Mapping) and bool(options.get("include_usage"))

    @property
    def asked(self) -> Mapping[str, Any]:
        """The members, with ``stream`` as the engine is asked."""
        return {**self.members, "stream": self.stream_upstream} if "stream" in self.members else self.members

    def decide_streaming(self, engine: Engine, streaming: Streaming) -> None:
        """Whether a stream that the client wants is also asked of the engine."""
        if self.streams and self.endpoint is not Endpoint.GENERATE and streaming != "always":
            self.stream_upstream = streaming == "auto" and engine.can_stream(self.endpoint, self.members)

    def for_engine(self, engine: Engine, raw: bytes, added: Mapping[str, Any] | None = None) -> bytes | None:
        """The client's text ``raw`` with the engine's fields and those ``added``, all else as it was.

        None if it cannot be edited.
        """
        fields = {**engine.request_fields(self.endpoint, self.asked), **(added or {})}
        options = self.members.get("stream_options")
        if self.stream_upstream and self.endpoint is not Endpoint.GENERATE:
            known = options if isinstance(options, Mapping) else {}
            fields["stream_options"] = {**known, "include_usage": True}
        elif self.streams and not self.stream_upstream:
            fields["stream"] = False
            if options is not None:
                fields["stream_options"] = None  # without a stream they are refused
        return self._with(raw, {name: value for name, value in fields.items() if not self._has(name, value)})

    def _with(self, raw: bytes, changed: Mapping[str, Any]) -> bytes | None:
        if not changed:
            return raw
        encoding = json.detect_encoding(raw)
        if encoding == "utf-8" and self.members and not self.members.keys() & changed.keys():
            # Nothing is replaced, so the long text in between need not be looked at, nor copied but once.
            end = raw.rindex(b"}")
            added = memoryview(orjson.dumps(changed))[1:]
            return b"".join((memoryview(raw)[:end], b",", added, memoryview(raw)[end + 1 :]))
        try:
            text = set_members(raw.decode(encoding, "surrogatepass"), changed)
        except ValueError:
            return None  # nested too deeply to be followed
        return text.encode(encoding, "surrogatepass")

    def _has(self, name: str, value: Any) -> bool:
        known = self.members.get(name)
        return type(known) is type(value) and known == value


def media_parts(body: Mapping[str, Any]) -> list[Any]:
    """The parts of a request's prompt that are not text, in order: those of its messages, and members of its own."""
    messages, prompt = body.get("messages"), body.get("prompt")
    contents = [message.get("content") for message in _list(messages) if isinstance(message, dict)]
    parts = [part for content in contents for part in _list(content) if _is_media(part)]
    holders = (body, prompt) if isinstance(prompt, dict) else (body,)
    return parts + [{name: one[name]} for one in holders for name in one if name in _MEDIA and one[name]]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_media(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    # vLLM takes parts without a type, whose one key says what they are.
    return any(_MEDIA_WORD.search(word) for word in (str(part.get("type")), *part))


def digests_of(parts: Iterable[Any]) -> list[str]:
    """One digest of each part, 32 hexadecimal digits, whatever the order of its keys."""
    return [sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:32] for part in parts]
