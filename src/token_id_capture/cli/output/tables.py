"""Plain tables: columns where they fit, else a block of lines for each row."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final

from token_id_capture.cli.options import printable

Row = Sequence[Any]
Pages = Iterable[Sequence[Row]]

_GAP: Final = "  "


def print_table(headers: Sequence[str], rows: Sequence[Row]) -> None:
    """Print rows that are all there; None and an empty text as ``-``."""
    sys.stdout.write("".join(table(headers, [rows], _or_dash)))


def table(
    headers: Sequence[str], pages: Pages, cell: Callable[[Any], str], widest_column: int = sys.maxsize
) -> Iterator[str]:
    """The text of a table, some rows at a time. Columns are as wide as the first page needs, numbers to the right.

    Where they are wider than the terminal, each row becomes a block of lines instead: folded ids
    cannot be read, nor copied.
    """
    pages = iter(pages)
    first = next(pages, [])
    cells = [[cell(value) for value in row] for row in first]
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    room = terminal_width()
    if room is not None and sum(widths) + len(_GAP) * (len(widths) - 1) > room:
        yield from _blocks(headers, chain([first], pages), cell)
        return
    right = [all(isinstance(value, int | float | None) for value in column) for column in zip(*first, strict=True)]
    pads = [str.rjust if is_right else str.ljust for is_right in right or [False] * len(headers)]
    widths = [min(width, widest_column) for width in widths]

    def line(row: Sequence[str]) -> str:
        return _GAP.join(pad(text, width) for pad, text, width in zip(pads, row, widths, strict=True)).rstrip() + "\n"

    yield line(headers)
    yield "".join(map(line, cells))
    for page in pages:
        yield "".join(line([cell(value) for value in row]) for row in page)


def terminal_width() -> int | None:
    """The width of standard output; None for a pipe, which gets whole lines for grep and awk."""
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        return None
    return shutil.get_terminal_size().columns


def _blocks(headers: Sequence[str], pages: Pages, cell: Callable[[Any], str]) -> Iterator[str]:
    width = max(map(len, headers))
    separator = ""
    for page in pages:
        for row in page:
            lines = (f"{header:{width}}{_GAP}{cell(value)}\n" for header, value in zip(headers, row, strict=True))
            yield separator + "".join(lines)
            separator = "\n"


def _or_dash(value: object) -> str:
    return "-" if value is None or value == "" else printable(str(value))
