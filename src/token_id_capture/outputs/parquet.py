"""Rows as a Parquet file, written in row groups of bounded size."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, BinaryIO, Final

from token_id_capture.builder.rows import SAMPLING_INTEGERS, SAMPLING_NUMBERS
from token_id_capture.errors import ConfigurationError, InvalidEntryError
from token_id_capture.outputs.columns import Column, Kind
from token_id_capture.outputs.jsonl import Row, parse

# A row group is held in memory until it is written: 13 bytes a token, and more where tokens lie deeper in a row.
_BYTES_PER_GROUP: Final = 13_000_000
_BYTES_PER_TOKEN: Final = 13
_ROWS_PER_GROUP: Final = 4_096
_TYPECODES: Final[dict[Kind, Any]] = {Kind.TOKEN_IDS: "i", Kind.LOSS_MASK: "b", Kind.LOG_PROBS: "d"}


class Parquet:
    """Token ids as lists of int32, masks of int8, log probabilities of float64, compressed with zstd."""

    def __init__(self, stream: BinaryIO, columns: Sequence[Column]) -> None:
        """Raises:
        ConfigurationError: pyarrow is not installed.
        """
        try:
            import pyarrow
            from pyarrow import compute, parquet
        except ImportError as error:
            raise ConfigurationError(
                "Parquet files need pyarrow: pip install 'token-id-capture[parquet]', or write JSON lines"
            ) from error
        self._arrow, self._compute = pyarrow, compute
        types = _types(pyarrow)
        self._types = [
            types[column.kind] if column.shape is None else column.shape.arrow_type(pyarrow) for column in columns
        ]
        self._columns = tuple(columns)
        self._schema = pyarrow.schema([(column.name, kind) for column, kind in zip(columns, self._types, strict=True)])
        self._writer = parquet.ParquetWriter(stream, self._schema, compression="zstd")
        self._sequences = [(column.name, _TYPECODES[column.kind]) for column in columns if column.kind in _TYPECODES]
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
        for name, typecode in self._sequences:
            row[name] = _packed(row[name], typecode)
        self._rows.append(row)
        if self._size >= _BYTES_PER_GROUP or len(self._rows) >= _ROWS_PER_GROUP:
            self._write_group()

    def finish(self) -> None:
        """Write what is held back, and the footer without which the file cannot be read."""
        self._write_group()
        self._writer.close()

    def _write_group(self) -> None:
        if self._rows:
            arrays = [
                self._array(column, kind, [row.get(column.name) for row in self._rows])
                for column, kind in zip(self._columns, self._types, strict=True)
            ]
            self._writer.write_table(self._arrow.Table.from_arrays(arrays, schema=self._schema))
        self._rows, self._size = [], 0

    def _array(self, column: Column, kind: Any, values: list[Any]) -> Any:
        if column.kind in _TYPECODES:
            return self._lists(kind, values)
        if column.shape is not None:
            values = column.shape.written(values)
        return self._arrow.array(values, type=kind)

    def _lists(self, kind: Any, values: list[memoryview]) -> Any:
        """A list array over packed items, which are not looked at one by one."""
        offsets = array("i", accumulate(map(len, values), initial=0))
        buffers = [None, self._arrow.py_buffer(b"".join(values))]
        items = self._arrow.Array.from_buffers(kind.value_type, offsets[-1], buffers)
        if kind.value_type == self._arrow.int32() and (self._compute.min(items).as_py() or 0) < 0:
            raise _too_large()
        return self._arrow.Array.from_buffers(
            kind, len(values), [None, self._arrow.py_buffer(offsets)], children=[items]
        )


def _packed(value: Any, typecode: Any) -> memoryview:
    """The items of a sequence as they lie in a column; a loss mask may be bytes, and all may be lists."""
    if isinstance(value, bytes):
        return memoryview(value)
    if not isinstance(value, list):
        return memoryview(value.buffer()).cast(typecode)
    try:
        return memoryview(array(typecode, value))
    except OverflowError as error:
        raise _too_large() from error


def _too_large() -> InvalidEntryError:
    return InvalidEntryError(
        f"a token id is larger than {2**31 - 1}, the largest of Parquet's int32 column: write JSON lines"
    )


def _types(arrow: Any) -> dict[Kind, Any]:
    """The type in Arrow of each kind of column."""
    start_and_end = [("start", arrow.int32()), ("end", arrow.int32())]
    return {
        Kind.TEXT: arrow.string(),
        Kind.INTEGER: arrow.int64(),
        Kind.NUMBER: arrow.float64(),
        Kind.FLAG: arrow.bool_(),
        Kind.SAMPLING: arrow.struct(
            [
                *((name, arrow.float64()) for name in SAMPLING_NUMBERS),
                *((name, arrow.int64()) for name in SAMPLING_INTEGERS),
                ("other", arrow.string()),
            ]
        ),
        Kind.TURN_SPANS: arrow.list_(
            arrow.struct(
                [*start_and_end, *((name, arrow.string()) for name in ("model_call_id", "response_id", "model"))]
            )
        ),
        Kind.WEIGHT_SPANS: arrow.list_(arrow.struct([*start_and_end, ("version", arrow.string())])),
        # An embedding refuses uint32, and no vocabulary needs the last bit.
        Kind.TOKEN_IDS: arrow.list_(arrow.int32()),
        Kind.LOSS_MASK: arrow.list_(arrow.int8()),
        Kind.LOG_PROBS: arrow.list_(arrow.float64()),
    }
