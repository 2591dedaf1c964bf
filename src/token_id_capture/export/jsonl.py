"""Rows as lines of JSON."""

from __future__ import annotations

from typing import Any, BinaryIO

import orjson

from token_id_capture.export.rows import Row


class JsonLines:
    """One object a row; sequences are arrays of numbers."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, row: Row) -> None:
        """Append a row."""
        self._stream.write(orjson.dumps(row, default=_plain, option=orjson.OPT_APPEND_NEWLINE))

    def finish(self) -> None:
        """Nothing is held back."""


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, bytes) else value.tolist()
