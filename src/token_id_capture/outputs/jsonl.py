"""Rows as lines of JSON."""

from __future__ import annotations

import json
from typing import Any, BinaryIO, TypeAlias

import orjson

Row: TypeAlias = dict[str, Any]


class JsonLines:
    """One object a row; sequences are arrays of numbers."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, row: Row | bytes) -> None:
        """Append a row, or the line of one as it is."""
        line = row if isinstance(row, bytes) else orjson.dumps(row, default=_plain, option=orjson.OPT_APPEND_NEWLINE)
        self._stream.write(line)

    def finish(self) -> None:
        """Nothing is held back."""

    def abandon(self) -> None:
        """Nothing is held back."""


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, bytes) else value.tolist()


def parse(line: bytes) -> Row:
    """The row of a line.

    Raises:
        ValueError: it is not a JSON object.
    """
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        row = json.loads(line)  # slower, and knows NaN and large numbers
    if not isinstance(row, dict):
        raise ValueError(f"not a JSON object, but {type(row).__name__}")
    return row
