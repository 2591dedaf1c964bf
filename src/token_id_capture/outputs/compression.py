"""Outputs that are compressed as their name says."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, cast

from token_id_capture.errors import ConfigurationError


class Compression(StrEnum):
    """What the bytes of a file are compressed with."""

    GZIP = "gz"
    ZSTANDARD = "zst"


def compression_of(path: Path) -> Compression | None:
    """What the name asks for; None for plain bytes."""
    ending = path.suffix.lower().removeprefix(".")
    return Compression(ending) if ending in set(Compression) else None


@contextmanager
def compressed(stream: BinaryIO, compression: Compression | None) -> Iterator[BinaryIO]:
    """A stream whose bytes go to ``stream``, compressed; the end is written when the block ends well.

    Raises:
        ConfigurationError: pyarrow, which has Zstandard, is not installed.
    """
    if compression is None:
        yield stream
        return
    lasting = _Unclosed(stream)
    # No time and no name in it, so that the same rows give the same bytes.
    gzipped = compression is Compression.GZIP
    with gzip.GzipFile("", "wb", fileobj=lasting, mtime=0) if gzipped else _zstandard(lasting) as written:
        try:
            yield cast(BinaryIO, written)
        except BaseException:
            lasting.give_up()
            raise


def _zstandard(stream: _Unclosed) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigurationError(
            "files that end in .zst need pyarrow: pip install 'token-id-capture[parquet]', or let the name end in .gz"
        ) from error
    return pyarrow.CompressedOutputStream(pyarrow.PythonFile(stream, "w"), "zstd")


class _Unclosed:
    """A stream that outlives its user: pyarrow closes what it writes to, and both write an end after an error."""

    closed = False

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def give_up(self) -> None:
        """Let what is still written go nowhere: the stream may be closed by now."""
        self._stream = io.BytesIO()

    def write(self, data: bytes) -> int:
        return self._stream.write(data)

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        self.closed = True
