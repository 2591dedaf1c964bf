"""Time cut into slots, values into bins. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

MOST_SLOTS: Final = 40

_WIDTHS: Final = (
    *(1, 5, 15, 30, 60, 300, 900, 1800, 3600, 3 * 3600, 6 * 3600, 12 * 3600),
    *(86_400, 2 * 86_400, 7 * 86_400, 30 * 86_400, 90 * 86_400, 365 * 86_400),
)


@dataclass(frozen=True, slots=True)
class Slots:
    """Time cut into equal slots: ``number`` of ``width`` seconds each, from ``start`` on."""

    start: float
    width: int
    number: int

    def label(self, slot: int) -> str:
        """When a slot begins, as precise as its width asks for."""
        begin = datetime.fromtimestamp(self.start + slot * self.width, UTC)
        if self.width >= 86_400:
            return f"{begin:%Y-%m-%d}"
        return f"{begin:%m-%d %H:%M}" if self.width >= 60 else f"{begin:%H:%M:%S}"


def cut(first: float, last: float) -> Slots:
    """Slots of a round width that hold both times, ``MOST_SLOTS`` at most."""
    for width in _WIDTHS:
        start = math.floor(first / width) * width
        number = math.floor((last - start) / width) + 1
        if number <= MOST_SLOTS:
            return Slots(start, width, number)
    width = math.ceil((last - first) / (MOST_SLOTS - 1))
    return Slots(first, width, math.floor((last - first) / width) + 1)


def short_number(value: float) -> str:
    """``950``, ``1.2k``, ``30M``."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:g}"


def doubling_bins(most: int) -> tuple[int, ...]:
    """The lower ends of bins that hold 0 to ``most``, each twice as wide as the one before: 0, 1, 2, 4, 8, ..."""
    return (0, *(2**power for power in range(most.bit_length())))


def even_bins(least: float, most: float, number: int) -> tuple[float, ...]:
    """The lower ends of ``number`` bins of one width, and the end of the last one."""
    width = (most - least) / number or 1.0
    return tuple(round(least + width * place, 6) for place in range(number + 1))


def binned(values: Sequence[float], bins: Sequence[float]) -> tuple[int, ...]:
    """How many values each bin holds; the last one has no end."""
    counts = [0] * len(bins)
    for value in values:
        counts[max(0, bisect_right(bins, value) - 1)] += 1
    return tuple(counts)
