"""Rows as a Parquet file, written in row groups of bounded size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import BinaryIO, Final

from token_id_capture.outputs.arrow import ArrowTables
from token_id_capture.outputs.columns import Column
from token_id_capture.outputs.jsonl import Row, parse

# A row group is held in memory until it is written: 13 bytes a token, and more where tokens lie deeper in a row.
_BYTES_PER_GROUP: Final = 13_000_000
_BYTES_PER_TOKEN: Final = 13
_ROWS_PER_GROUP: Final = 4_096


class Parquet:
    """The columns of ``ArrowTables``, compressed with zstd."""

    def __init__(self, stream: BinaryIO, columns: Sequence[Column]) -> None:
        """Raises:
        ConfigurationError: pyarrow is not installed.
        """
        self._tables = ArrowTables(columns)
        from pyarrow import parquet

        self._writer = parquet.ParquetWriter(stream, self._tables.schema, compression="zstd")
        self._rows: list[Row] = []
        self._size = 0

    def write(self, row: Row | bytes) -> None:
        """Append a row, or the row of a line of JSON.

        Raises:
            InvalidEntryError: a token id does not fit into the column.
        """
        if isinstance(row, bytes):
            self._size += len(row)
            row = parse(row)
        else:
            self._size += _BYTES_PER_TOKEN * len(row["token_ids"])
        self._tables.pack(row)
        self._rows.append(row)
        if self._size >= _BYTES_PER_GROUP or len(self._rows) >= _ROWS_PER_GROUP:
            self._write_group()

    def finish(self) -> None:
        """Write what is held back, and the footer without which the file cannot be read."""
        self._write_group()
        self._writer.close()

    def abandon(self) -> None:
        """Leave the file without its end, as nobody will read it."""
        self._writer.is_open = False

    def _write_group(self) -> None:
        if self._rows:
            self._writer.write_table(self._tables.table(self._rows))
        self._rows, self._size = [], 0
