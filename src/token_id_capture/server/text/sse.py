"""Server-sent events as bytes, so that what is passed on is what came.

The rules are those of the WHATWG HTML standard, section "Server-sent events": lines end with CR,
LF or CRLF, a blank line ends an event, ``data`` may have several lines and one space after the
colon is not part of the value. Only ``data`` and ``event`` matter here; comments and other fields
stay in the raw bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

DONE: Final = b"[DONE]"
"""The data of the event that ends an OpenAI stream."""

_LINE_END = re.compile(rb"\r\n?|\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Event:
    """One event: its bytes with everything in between, its name, and where its data lines are in them.

    ``after_cr`` says that the first byte is the line feed that belongs to the end of the event before.
    """

    raw: bytes
    name: bytes
    spans: tuple[tuple[int, int], ...]
    after_cr: bool = False

    @property
    def data(self) -> bytes | None:
        """The data lines joined by LF; None for an event without any, such as a comment."""
        if len(self.spans) == 1:
            start, end = self.spans[0]
            return self.raw[start:end]
        return b"\n".join(self.raw[start:end] for start, end in self.spans) if self.spans else None

    def with_data(self, data: bytes) -> bytes:
        """The bytes of this event with other JSON data; all else stays.

        Data that came on several lines goes on the first one: a line break in JSON is only space.
        """
        start, end = self.spans[0]
        if len(self.spans) == 1:
            return self.raw[:start] + data + self.raw[end:]
        return self.raw[:start] + data.replace(b"\n", b" ") + self.raw[self.spans[-1][1] :]


class EventParser:
    """Cuts a stream of bytes into events, whatever the boundaries of its chunks are.

    An event is returned as soon as the first byte of its last line end is there. The raw bytes of
    all events, followed by ``rest``, are the bytes that were fed.
    """

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._searched = 0
        self._line = 0
        self._after_cr = False
        self._begins_after_cr = False
        self._name = b""
        self._spans: list[tuple[int, int]] = []
        self._first_line = True

    @property
    def between_events(self) -> bool:
        """Whether what comes next begins an event, as it does after a whole one that ended with a line feed."""
        return not (self._first_line or self._after_cr or any(self._pieces))

    @property
    def rest(self) -> bytes:
        """What was fed after the last complete event."""
        return b"".join(self._pieces)

    @property
    def rest_after_cr(self) -> bool:
        """Whether ``rest`` begins with the line feed that belongs to the end of the last event."""
        return self._begins_after_cr

    def feed(self, chunk: bytes) -> list[Event]:
        """The events that ``chunk`` completes."""
        self._pieces.append(chunk)
        if b"\n" not in chunk and b"\r" not in chunk:
            # An event with a long prompt comes in many chunks: it is neither copied nor searched with each.
            self._searched += len(chunk)
            return []
        data = b"".join(self._pieces)
        events: list[Event] = []
        begin = 0
        # Without CR, as engines write, a line's end is found many times faster than by the expression.
        line_end = _line_feed if b"\r" not in data else _any_line_end
        while span := line_end(data, self._searched):
            start, (end, after) = self._line, span
            self._line = self._searched = after
            split_crlf = self._after_cr and start == end and data[end:after] == b"\n"
            self._after_cr = data[end:after] == b"\r"
            if split_crlf:
                self._begins_after_cr = self._begins_after_cr or start == begin
                continue
            if self._first_line:
                start += len(_BYTE_ORDER_MARK) if data.startswith(_BYTE_ORDER_MARK) else 0
                self._first_line = False
            if start < end:
                self._field(data, start, end, begin)
            else:
                events.append(Event(data[begin:after], self._name, tuple(self._spans), self._begins_after_cr))
                begin = after
                self._name, self._spans, self._begins_after_cr = b"", [], False
        self._pieces = [data[begin:]]
        self._line -= begin
        self._searched = len(data) - begin
        return events

    def _field(self, data: bytes, start: int, end: int, begin: int) -> None:
        colon = data.find(b":", start, end)
        name_end = end if colon < 0 else colon
        value = min(name_end + 1, end)
        if data[value : value + 1] == b" " and value < end:
            value += 1
        name = data[start:name_end]
        if name == b"data":
            self._spans.append((value - begin, end - begin))
        elif name == b"event":
            self._name = data[value:end]


def _line_feed(data: bytes, start: int) -> tuple[int, int] | None:
    """Where the next line feed from ``start`` on is, and where it ends."""
    found = data.find(b"\n", start)
    return None if found < 0 else (found, found + 1)


def _any_line_end(data: bytes, start: int) -> tuple[int, int] | None:
    """The same for whatever ends a line."""
    match = _LINE_END.search(data, start)
    return None if match is None else match.span()
