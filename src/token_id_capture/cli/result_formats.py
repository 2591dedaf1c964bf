"""The forms in which the rows of a query are printed, each without holding more than some of them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final

import orjson

from token_id_capture.cli.common import printable, terminal_width

Row = Sequence[Any]
Pages = Iterable[Sequence[Row]]

_GAP: Final = "  "
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
        yield separator + ",\n".join(objects)
        separator = ",\n"
    yield "[]\n" if separator == "[\n" else "\n]\n"


def as_table(columns: Sequence[str], pages: Pages) -> Iterator[str]:
    """Plain columns, as wide as the first page needs, numbers to the right.

    Where they are wider than the terminal, each row becomes a block of lines.
    """
    pages = iter(pages)
    first = next(pages, [])
    cells = [[_cell(value) for value in row] for row in first]
    headers = [printable(name) for name in columns]
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    room = terminal_width()
    if room is not None and sum(widths) + len(_GAP) * (len(widths) - 1) > room:
        yield from _blocks(headers, chain([first], pages))
        return
    numeric = [all(isinstance(value, int | float | None) for value in column) for column in zip(*first, strict=True)]
    layout = _Layout([min(width, _WIDEST_COLUMN) for width in widths], numeric or [False] * len(headers))
    yield layout.line(headers)
    yield "".join(map(layout.line, cells))
    for page in pages:
        yield "".join(layout.line([_cell(value) for value in row]) for row in page)


class _Layout:
    def __init__(self, widths: list[int], numeric: list[bool]) -> None:
        self._columns = [
            (str.rjust if is_number else str.ljust, width) for width, is_number in zip(widths, numeric, strict=True)
        ]

    def line(self, cells: Sequence[str]) -> str:
        padded = (pad(cell, width) for cell, (pad, width) in zip(cells, self._columns, strict=True))
        return _GAP.join(padded).rstrip() + "\n"


def _blocks(headers: list[str], pages: Pages) -> Iterator[str]:
    width = max(map(len, headers))
    separator = ""
    for page in pages:
        for row in page:
            lines = (f"{header:{width}}{_GAP}{_cell(value)}\n" for header, value in zip(headers, row, strict=True))
            yield separator + "".join(lines)
            separator = "\n"


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
