"""Request bodies that a client compressed, within a limit of what comes out."""

from __future__ import annotations

import zlib
from typing import Final

# zlib's words for the two formats that it reads; 32 more finds out by itself between them.
_AUTOMATIC: Final = 32 + zlib.MAX_WBITS
READABLE_CODINGS: Final = frozenset({"gzip", "x-gzip", "deflate"})


class TooLongError(ValueError):
    """More comes out than was allowed."""


def decompress(data: bytes, limit: int) -> bytes:
    """What ``gzip`` or ``deflate`` (RFC 9110, section 8.4.1) made ``data`` of, at most ``limit`` bytes of it.

    Raises:
        TooLongError: it is longer.
        ValueError: the data is damaged, or ends early.
    """
    pieces: list[bytes] = []
    room = limit
    while data:
        stream = zlib.decompressobj(_AUTOMATIC)
        try:
            piece = stream.decompress(data, room + 1)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        if len(piece) > room:
            raise TooLongError(f"more than {limit} bytes")
        if not stream.eof:
            raise ValueError("it ends early")
        room -= len(piece)
        pieces.append(piece)
        data = stream.unused_data  # a file of gzip may have several members
    return b"".join(pieces)
