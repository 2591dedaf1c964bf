"""Runs of a stream's chunks that differ only in their text, ids and log probabilities, read as one chunk.

An engine writes the chunks of a stream alike: each has one token's text, its log probability and its id, at the
same places of the same text. The first such chunk is parsed. Its three values are cut out, a mark is put in the
place of each, and the rest is parsed once more: the marks must be where the values belong. Whatever has the same
bytes around three values of the same kind then says the same except for the values, and neither has to be parsed
nor looked through for what the client may not see. The values of all chunks up to the next one of another shape
become those of one chunk, which says what they say one after the other.

A value is matched by JSON's own grammar, strictly, so that nothing else passes for one, and none can turn out
later to be too large or half a character. A chunk that does not fit is parsed as a whole.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import orjson

from token_id_capture.server.engines.base import PackedLogProbs
from token_id_capture.server.text.sse import Event
from token_id_capture.server.wire.fast_parse import packed_log_probs
from token_id_capture.server.wire.redaction import ClientView

_PREFIX: Final = b"data: "
_SUFFIX: Final = b"\n\n"
_LONGEST: Final = 4096
_MOST_UNUSED: Final = 4
"""So many shapes in a row that fit no further chunk, and no more are tried."""
_KEPT: Final = 4

_MOST_PENDING: Final = 1024
"""So many chunks, and they are read: their values are longer as text."""

_PLAIN: Final = rb'[^"\\\x00-\x1f]*+'
_ESCAPE: Final = rb'\\(?:["\\/bfnrt]|u(?:[0-9a-cefA-CEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))'
_IN_QUOTES: Final = _PLAIN + rb"(?:" + _ESCAPE + _PLAIN + rb")*+"
_TEXT: Final = rb'"' + _IN_QUOTES + rb'"'
# A token that spells an id is compared with it, where all of them do: the chunk that a shape was learnt from does not.
_TOKEN: Final = rb'"(?!token_id:)' + _IN_QUOTES + rb'"'
_INTEGER: Final = rb"(?:0|[1-9][0-9]{0,9}+)"
_NUMBER: Final = rb"-?" + _INTEGER + rb"(?:\.[0-9]++)?+(?:[eE][-+]?[0-9]{1,2}+)?+"
_INTEGERS: Final = _INTEGER + rb"(?:," + _INTEGER + rb")*+"
_ENTRY: Final = rb'\{"token":%b,"logprob":%b,"bytes":(?:null|\[(?:%b)?+\]),"top_logprobs":\[\]\}' % (
    _TOKEN,
    _NUMBER,
    _INTEGERS,
)
_ENTRIES: Final = _ENTRY + rb"(?:," + _ENTRY + rb")*+"

_TEXT_MEMBER = re.compile(rb'"(?:content|reasoning|reasoning_content|arguments)":(%b)' % _TEXT)
_LOG_PROBS_MEMBER = re.compile(rb'"logprobs":(\{"content":\[%b\]\})' % _ENTRIES)
_IDS_MEMBER = re.compile(rb'"token_ids":(\[%b\])' % _INTEGERS)

_SECRET: Final = secrets.token_hex(16)
_TEXT_MARK, _LOG_PROBS_MARK, _IDS_MARK = (f"{name}-{_SECRET}" for name in ("text", "logprobs", "token_ids"))


_Values: TypeAlias = tuple[bytes, bytes, bytes]


class ChunkRun(NamedTuple):
    """Events that follow each other: where they end, and what the client sees of them."""

    end: int
    visible: bytes


class ChunkShapes:
    """The shapes of one stream's chunks. Unless the engine's reader takes ``packed`` arrays there are none."""

    def __init__(self, view: ClientView, *, packed: bool) -> None:
        self._view = view
        self._shapes: list[_Shape] = []
        self._unused = 0 if packed else _MOST_UNUSED
        self._shape: _Shape | None = None
        self._pending: list[_Values] = []

    def run(self, data: bytes, start: int) -> ChunkRun | None:
        """The longest run of events of one known shape that begins at ``start``.

        What they say is kept for ``read``, which is due first where ``data`` continues in another shape.
        """
        try:
            for shape in self._shapes if self._shape is None else (self._shape,):
                if (run := shape.run(data, start, self._pending)) is not None:
                    self._shape = shape
                    self._unused = 0
                    return run
        except ValueError:
            # Looked for at every further event, such a run would cost the square of its length.
            self._shapes, self._unused = [], _MOST_UNUSED
        return None

    @property
    def due(self) -> bool:
        """Whether enough is kept to be read."""
        return len(self._pending) >= _MOST_PENDING

    def read(self) -> Mapping[str, Any] | None:
        """The chunk that says what the chunks of the latest runs say, one after the other; None if there are none."""
        if self._shape is None:
            return None
        chunk = self._shape.chunk_of(self._pending)
        self._shape, self._pending = None, []
        return chunk

    def learn(self, event: Event, chunk: Mapping[str, Any]) -> None:
        """Take the shape of an event, whose data says ``chunk``, for those that may follow."""
        if self._unused < _MOST_UNUSED and (shape := _Shape.of(event, chunk, self._view)) is not None:
            self._shapes = [shape, *self._shapes[: _KEPT - 1]]
            self._unused += 1


@dataclass(slots=True)
class _Shape:
    """An event without its values: the bytes around them, the rest as it was parsed, and as the client sees it."""

    head: bytes
    pattern: re.Pattern[bytes]
    chunk: Mapping[str, Any]
    has_text: bool
    visible: tuple[bytes, bytes] | None
    """What the client sees before and after the text; None where it sees all."""

    @classmethod
    def of(cls, event: Event, chunk: Mapping[str, Any], view: ClientView) -> _Shape | None:
        raw = event.raw
        if not (len(raw) < _LONGEST and raw.startswith(_PREFIX) and raw.endswith(_SUFFIX) and len(event.spans) == 1):
            return None
        delta = raw.find(b'"delta":')
        log_probs = _LOG_PROBS_MEMBER.search(raw, delta) if delta >= 0 else None
        ids = None if log_probs is None else _IDS_MEMBER.search(raw, log_probs.end())
        if log_probs is None or ids is None:
            return None
        text = _TEXT_MEMBER.search(raw, delta, log_probs.start())
        before, after = (b"", b"") if text is None else (raw[: text.start(1)], raw[text.end(1) : log_probs.start(1)])
        head = before or raw[: log_probs.start(1)]
        between, tail = raw[log_probs.end(1) : ids.start(1)], raw[ids.end(1) :]
        marked = b"".join(
            (
                head,
                b"" if text is None else b'"%b"%b' % (_TEXT_MARK.encode(), after),
                b'"%b"%b"%b"%b' % (_LOG_PROBS_MARK.encode(), between, _IDS_MARK.encode(), tail),
            )
        )
        rest = marked[len(_PREFIX) : -len(_SUFFIX)]
        try:
            parsed = orjson.loads(rest)
            if not _has_marks(parsed, has_text=text is not None):
                return None
            shown = view.shape(rest, parsed)
        except ValueError:
            return None
        seen = _parts_seen(shown, rest, has_text=text is not None)
        if seen is None:
            return None
        pattern = b'%b%b\\{"content":\\[(%b)\\]\\}%b\\[(%b)\\]%b' % (
            b"()" if text is None else b"(%b)" % _TEXT,
            re.escape(after),
            _ENTRIES,
            re.escape(between),
            _INTEGERS,
            re.escape(tail),
        )
        return cls(head, re.compile(pattern), parsed, text is not None, seen or None)

    def run(self, data: bytes, start: int, values: list[_Values]) -> ChunkRun | None:
        """The longest run of events of this shape from ``start`` on; adds their values to ``values``.

        Raises:
            ValueError: the bytes of one are not text.
        """
        head, match_at = self.head, self.pattern.match
        found: list[_Values] = []
        end = start
        while data.startswith(head, end) and (match := match_at(data, end + len(head))):
            found.append(match.groups())  # type: ignore[arg-type]
            end = match.end()
        if not found:
            return None
        events = data[start:end]
        if not events.isascii():
            events.decode()
        values += found
        if self.visible is None:
            return ChunkRun(end, events)
        before, after = self.visible
        return ChunkRun(end, before + (after + before).join([text for text, _, _ in found]) + after)

    def chunk_of(self, values: list[_Values]) -> dict[str, Any]:
        """The chunk that says what all of them say."""
        texts, entries, ids = zip(*values, strict=True)
        (choice,) = self.chunk["choices"]
        filled = {
            **choice,
            "logprobs": PackedLogProbs(packed_log_probs(b"[%b]" % b",".join(entries))),
            "token_ids": orjson.loads(b"[%b]" % b",".join(ids)),
        }
        if self.has_text:
            text = "".join(orjson.loads(b"[%b]" % b",".join(texts)))
            filled["delta"] = _with_text(choice["delta"], text)
        return {**self.chunk, "choices": [filled]}


def _has_marks(parsed: Any, *, has_text: bool) -> bool:
    """Whether the marks are where the values belong, in a chunk of one choice that is not finished."""
    choices = parsed.get("choices") if isinstance(parsed, dict) else None
    if not (isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict)):
        return False
    (choice,) = choices
    delta = choice.get("delta")
    return (
        (choice.get("logprobs"), choice.get("token_ids")) == (_LOG_PROBS_MARK, _IDS_MARK)
        and choice.get("finish_reason") is None
        and parsed.get("error") is None
        and isinstance(delta, dict)
        and (not has_text or _with_text(delta, "") != delta)
    )


def _with_text(delta: Mapping[str, Any], text: str) -> dict[str, Any]:
    """The delta with this text in the place of the mark; as it is where there is none that texts are joined at."""
    for name, value in delta.items():
        if value == _TEXT_MARK:
            return {**delta, name: text}
    calls = delta.get("tool_calls")
    if isinstance(calls, list) and len(calls) == 1 and isinstance(calls[0], dict):
        function = calls[0].get("function")
        if isinstance(function, dict) and function.get("arguments") == _TEXT_MARK:
            return {**delta, "tool_calls": [{**calls[0], "function": {**function, "arguments": text}}]}
    return dict(delta)


def _parts_seen(shown: bytes | None, rest: bytes, *, has_text: bool) -> tuple[()] | tuple[bytes, bytes] | None:
    """What the client sees before and after the text of an event; empty where it sees all; None where it is told
    apart event by event."""
    if shown == rest:
        return ()
    if shown is None or _LOG_PROBS_MARK.encode() in shown or _IDS_MARK.encode() in shown:
        return None
    event = _PREFIX + shown + _SUFFIX
    if not has_text:
        return event, b""
    before, mark, after = event.partition(b'"%b"' % _TEXT_MARK.encode())
    return (before, after) if mark else None
