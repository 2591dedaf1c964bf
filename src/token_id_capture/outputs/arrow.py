"""Rows as tables of pyarrow: token ids as lists of int32, masks of int8, log probabilities of float64."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, BinaryIO, Final

from token_id_capture.builder.rows import SAMPLING_INTEGERS, SAMPLING_NUMBERS
from token_id_capture.errors import ConfigurationError, InvalidEntryError
from token_id_capture.outputs.columns import Column, Kind
from token_id_capture.outputs.jsonl import Row

_TYPECODES: Final[dict[Kind, Any]] = {Kind.TOKEN_IDS: "I", Kind.LOSS_MASK: "b", Kind.LOG_PROBS: "d"}


class ArrowTables:
    """Makes tables of these columns; ``schema`` is theirs."""

    def __init__(self, columns: Sequence[Column]) -> None:
        """Raises:
        ConfigurationError: pyarrow is not installed.
        """
        try:
            import pyarrow
        except ImportError as error:
            raise ConfigurationError(
                "Parquet and Arrow need pyarrow: pip install 'token-id-capture[parquet]', or write JSON lines"
            ) from error
        self._arrow = pyarrow
        self._columns = tuple(columns)
        self._sequences = [(column.name, _TYPECODES[column.kind]) for column in columns if column.kind in _TYPECODES]
        types = _types(pyarrow)
        self.schema = pyarrow.schema(
            [
                (column.name, types[column.kind] if column.shape is None else column.shape.arrow_type(pyarrow))
                for column in columns
            ]
        )

    def pack(self, row: Row) -> None:
        """Put the sequences of a row into as few bytes as a table has.

        Raises:
            InvalidEntryError: a token id does not fit into its column.
        """
        for name, typecode in self._sequences:
            row[name] = _packed(row[name], typecode)

    def table(self, rows: Sequence[Row]) -> Any:
        """The rows, packed or not, as a table.

        Raises:
            InvalidEntryError: a token id does not fit into its column.
        """
        arrays = [
            self._array(column, field.type, [row.get(column.name) for row in rows])
            for column, field in zip(self._columns, self.schema, strict=True)
        ]
        return self._arrow.Table.from_arrays(arrays, schema=self.schema)

    def _array(self, column: Column, kind: Any, values: list[Any]) -> Any:
        if column.kind in _TYPECODES:
            return self._lists(kind, column.kind, [_packed(value, _TYPECODES[column.kind]) for value in values])
        if column.shape is not None:
            values = column.shape.written(values)
        return self._arrow.array(values, type=kind)

    def _lists(self, kind: Any, of: Kind, values: list[memoryview]) -> Any:
        """A list array over packed items, which are not looked at one by one."""
        arrow, offsets = self._arrow, array("i", accumulate(map(len, values), initial=0))
        packed = arrow.uint32() if of is Kind.TOKEN_IDS else kind.value_type
        items = arrow.Array.from_buffers(packed, offsets[-1], [None, arrow.py_buffer(b"".join(values))])
        try:
            items = items.cast(kind.value_type)
        except arrow.ArrowInvalid as error:
            raise _too_large(error) from error
        return arrow.Array.from_buffers(kind, len(values), [None, arrow.py_buffer(offsets)], children=[items])


class ArrowStream:
    """Rows as an Arrow stream, a table each."""

    def __init__(self, stream: BinaryIO, columns: Sequence[Column]) -> None:
        """Raises:
        ConfigurationError: pyarrow is not installed.
        """
        self._tables = ArrowTables(columns)
        from pyarrow import ipc

        self._writer = ipc.new_stream(stream, self._tables.schema)

    def write(self, row: Row) -> None:
        """Append a row.

        Raises:
            InvalidEntryError: a token id does not fit into the column.
        """
        self._writer.write_table(self._tables.table([row]))

    def finish(self) -> None:
        """Write the end of the stream."""
        self._writer.close()


def _packed(value: Any, typecode: Any) -> memoryview:
    """The items of a sequence as they lie in a column; a loss mask may be bytes, and all may be lists."""
    if isinstance(value, bytes | memoryview):
        return memoryview(value)
    if not isinstance(value, list):
        return memoryview(value.buffer()).cast(typecode)
    try:
        return memoryview(array(typecode, value))
    except OverflowError as error:
        raise _too_large(error) from error


def _too_large(error: Exception) -> InvalidEntryError:
    return InvalidEntryError(f"a token id is too large for the int32 column, so write JSON lines: {error}")


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
