"""The forms in which the rows of a query are printed, each without holding more than some of them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any, Final

import orjson

from token_id_capture.cli.options import escaped_json, printable
from token_id_capture.cli.output.tables import Pages, table

_WIDEST_COLUMN: Final = 80


def as_csv(columns: Sequence[str], pages: Pages) -> Iterator[str]:
    """Comma-separated values with a header; NULL is empty, a blob is hexadecimal."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    for page in pages:
        writer.writerows([_plain(value) for value in row] for row in page)
        yield buffer.getvalue()
        buffer.seek(0)
        buffer.truncate()
    yield buffer.getvalue()


def as_json(columns: Sequence[str], pages: Pages) -> Iterator[str]:
    """One array of objects, a line each; a blob is hexadecimal text."""
    names = _distinct(columns)
    separator = "[\n"
    for page in pages:
        objects = [
            orjson.dumps({name: _plain(value) for name, value in zip(names, row, strict=True)}).decode() for row in page
        ]
        yield separator + escaped_json(",\n".join(objects))
        separator = ",\n"
    yield "[]\n" if separator == "[\n" else "\n]\n"


def as_table(columns: Sequence[str], pages: Pages) -> Iterator[str]:
    """Plain columns, or blocks where those are too wide; a blob is its size."""
    return table([printable(name) for name in columns], pages, _cell, _WIDEST_COLUMN)


def _cell(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    return printable(value) if isinstance(value, str) else repr(value)


def _plain(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else value


def _distinct(columns: Sequence[str]) -> list[str]:
    """Names for the keys of an object: a repeated one gets a number."""
    names: list[str] = []
    for column in columns:
        name, number = column, 2
        while name in names:
            name, number = f"{column}_{number}", number + 1
        names.append(name)
    return names
