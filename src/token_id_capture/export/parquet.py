"""Rows as a Parquet file, written in row groups of bounded size."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, BinaryIO, Final

import orjson

from token_id_capture.errors import ConfigurationError, InvalidEntryError
from token_id_capture.export.columns import Column, Kind
from token_id_capture.export.rows import Row

# A row group is held in memory until it is written: 13 bytes a token.
_TOKENS_PER_GROUP: Final = 1_000_000
_ROWS_PER_GROUP: Final = 4_096
_LARGEST_ID: Final = 2**31 - 1


class Parquet:
    """Token ids as lists of int32, masks of int8, log probabilities of float64, compressed with zstd."""

    def __init__(self, stream: BinaryIO, columns: Sequence[Column]) -> None:
        """Raises:
        ConfigurationError: pyarrow is not installed.
        """
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise ConfigurationError(
                "Parquet files need pyarrow: pip install 'token-id-capture[parquet]', or choose --format jsonl"
            ) from error
        self._arrow = pyarrow
        self._types = {
            Kind.TEXT: pyarrow.string(),
            Kind.INTEGER: pyarrow.int64(),
            Kind.NUMBER: pyarrow.float64(),
            Kind.FLAG: pyarrow.bool_(),
            Kind.TEXTS: pyarrow.list_(pyarrow.string()),
            Kind.JSON: pyarrow.string(),
            # An embedding refuses uint32, and no vocabulary needs the last bit.
            Kind.TOKEN_IDS: pyarrow.list_(pyarrow.int32()),
            Kind.TURN_SPANS: pyarrow.list_(
                pyarrow.struct(
                    [
                        *((name, pyarrow.int32()) for name in ("start", "end")),
                        *((name, pyarrow.string()) for name in ("model_call_id", "response_id", "model")),
                    ]
                )
            ),
            Kind.WEIGHT_SPANS: pyarrow.list_(
                pyarrow.struct([("start", pyarrow.int32()), ("end", pyarrow.int32()), ("version", pyarrow.string())])
            ),
            Kind.LOSS_MASK: pyarrow.list_(pyarrow.int8()),
            Kind.LOG_PROBS: pyarrow.list_(pyarrow.float64()),
        }
        self._columns = tuple(columns)
        self._schema = pyarrow.schema([(column.name, self._types[column.kind]) for column in columns])
        self._writer = parquet.ParquetWriter(stream, self._schema, compression="zstd")
        self._rows: list[Row] = []
        self._tokens = 0

    def write(self, row: Row) -> None:
        """Append a row."""
        self._rows.append(row)
        self._tokens += len(row["token_ids"])
        if self._tokens >= _TOKENS_PER_GROUP or len(self._rows) >= _ROWS_PER_GROUP:
            self._write_group()

    def finish(self) -> None:
        """Write what is held back, and the footer without which the file cannot be read."""
        self._write_group()
        self._writer.close()

    def _write_group(self) -> None:
        if self._rows:
            arrays = [self._array(column, [row[column.name] for row in self._rows]) for column in self._columns]
            self._writer.write_table(self._arrow.Table.from_arrays(arrays, schema=self._schema))
        self._rows, self._tokens = [], 0

    def _array(self, column: Column, values: list[Any]) -> Any:
        kind = self._types[column.kind]
        if column.kind is Kind.TOKEN_IDS and any(max(value, default=0) > _LARGEST_ID for value in values):
            raise InvalidEntryError(f"a token id is larger than {_LARGEST_ID}, the largest of Parquet's int32 column")
        if column.kind in (Kind.TOKEN_IDS, Kind.LOG_PROBS):
            return self._lists(kind, [len(value) for value in values], b"".join(value.buffer() for value in values))
        if column.kind is Kind.LOSS_MASK:
            return self._lists(kind, [len(value) for value in values], b"".join(values))
        if column.kind is Kind.JSON:
            values = [None if value is None else orjson.dumps(value).decode() for value in values]
        return self._arrow.array(values, type=kind)

    def _lists(self, kind: Any, lengths: list[int], items: bytes) -> Any:
        """A list array over packed items, which are not looked at one by one."""
        offsets = array("i", accumulate(lengths, initial=0))
        return self._arrow.Array.from_buffers(
            kind,
            len(lengths),
            [None, self._arrow.py_buffer(offsets)],
            children=[
                self._arrow.Array.from_buffers(kind.value_type, offsets[-1], [None, self._arrow.py_buffer(items)])
            ],
        )
