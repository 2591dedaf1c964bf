"""Tables: rich draws them on a terminal; a pipe gets plain columns, a line a row, for grep and awk."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from token_id_capture.cli.options import output_console, printable, terminal_width

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

Row = Sequence[Any]
Pages = Iterable[Sequence[Row]]

_GAP: Final = "  "
# A column that needs no more is never folded, and one that is folded has at least as much.
_FOLDED_FROM: Final = 12
# A word up to this length is whole, if there is room: a reason, a time, an id that people gave.
_WHOLE_WORD: Final = 24
_STYLES: Final = {
    "delivered": "green",
    "alive": "green",
    "exact": "green",
    "masked": "yellow",
    "failed": "red",
    "lost": "red",
    "not captured": "red",
    "retired": "dim",
}
"""Cells that are one of these words, or begin with it and a colon, are coloured."""


def print_table(headers: Sequence[str], rows: Sequence[Row]) -> None:
    """Print rows that are all there; None and an empty text as ``-``."""
    sys.stdout.write("".join(table(headers, [rows], _or_dash)))


def table(
    headers: Sequence[str], pages: Pages, cell: Callable[[Any], str], widest_column: int = sys.maxsize
) -> Iterator[str]:
    """The text of a table, some rows at a time. Columns are as wide as the first page needs, numbers to the right.

    On a terminal that is too narrow, long cells are folded within their column. Where even that leaves no room,
    each row becomes a block of lines.
    """
    pages = iter(pages)
    first = next(pages, [])
    cells = [[cell(value) for value in row] for row in first]
    columns = list(zip(headers, *cells, strict=True))
    right = [all(isinstance(value, int | float | None) for value in column) for column in zip(*first, strict=True)]
    right = right or [False] * len(headers)
    texts = chain([cells], ([[cell(value) for value in row] for row in page] for page in pages))
    if (room := terminal_width()) is None:
        yield from _plain(headers, texts, [min(max(map(len, column)), widest_column) for column in columns], right)
        return
    widths = _fit(columns, room)
    if widths is None:
        yield from _rendered(_blocks(headers, page, offset > 0) for offset, page in enumerate(texts))
    else:
        yield from _rendered(_columns(headers, page, widths, right, offset == 0) for offset, page in enumerate(texts))


def _plain(
    headers: Sequence[str], pages: Iterable[list[list[str]]], widths: list[int], right: list[bool]
) -> Iterator[str]:
    pads = [str.rjust if is_right else str.ljust for is_right in right]

    def line(row: Sequence[str]) -> str:
        return _GAP.join(pad(text, width) for pad, text, width in zip(pads, row, widths, strict=True)).rstrip() + "\n"

    yield line(headers)
    for page in pages:
        yield "".join(map(line, page))


def _fit(columns: Sequence[Sequence[str]], room: int) -> list[int] | None:
    """The widths with which these columns fit, the widest cut; None if that would leave too little."""
    room -= len(_GAP) * (len(columns) - 1)
    natural = [max(map(len, column)) for column in columns]
    for whole_word in (_WHOLE_WORD, _FOLDED_FROM):
        least = [_least(column, whole_word) for column in columns]
        if sum(least) <= room:
            cut = (
                [max(min(width, most), floor) for width, floor in zip(natural, least, strict=True)]
                for most in range(room, -1, -1)
            )
            return next(widths for widths in cut if sum(widths) <= room)
    return None


def _least(column: Sequence[str], whole_word: int) -> int:
    """How narrow the column may become: its longest word, or where that is too long, enough for a part of it."""
    longest = max((len(word) for text in column for word in text.split()), default=0)
    return longest if longest <= whole_word else _FOLDED_FROM


def _columns(
    headers: Sequence[str], page: list[list[str]], widths: list[int], right: list[bool], with_headers: bool
) -> RenderableType:
    from rich.table import Table

    drawn = Table(box=None, pad_edge=False, padding=(0, len(_GAP), 0, 0), header_style="bold", show_header=with_headers)
    for header, width, is_right in zip(headers, widths, right, strict=True):
        drawn.add_column(header, width=width, overflow="fold", justify="right" if is_right else "left")
    for row in page:
        drawn.add_row(*map(_coloured, row))
    return drawn


def _blocks(headers: Sequence[str], page: list[list[str]], follows: bool) -> RenderableType:
    """A block of lines for each row: its headers, and beside them what stands below them elsewhere."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table.grid(padding=(0, len(_GAP), 0, 0), pad_edge=False)
    drawn.add_column(no_wrap=True)
    drawn.add_column(overflow="fold")
    for number, row in enumerate(page):
        if number or follows:
            drawn.add_row("", "")
        for header, text in zip(headers, row, strict=True):
            drawn.add_row(Text(header, style="bold"), _coloured(text))
    return drawn


def _coloured(text: str) -> Text:
    from rich.text import Text

    return Text(text, style=_STYLES.get(text.partition(":")[0], ""))


def _rendered(drawings: Iterable[RenderableType]) -> Iterator[str]:
    """What a console would print, without blanks at the ends of lines."""
    console = output_console()
    for drawing in drawings:
        yield _captured(console, drawing)


def _captured(console: Console, drawing: RenderableType) -> str:
    with console.capture() as captured:
        console.print(drawing)
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def _or_dash(value: object) -> str:
    return "-" if value is None or value == "" else printable(str(value))
