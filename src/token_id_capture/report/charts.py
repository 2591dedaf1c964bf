"""Bars over time and bars of reasons, in percent of a drawing's width. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

CHART_HEIGHT: Final = 180
"""Pixels of the plot, without its labels."""

MOST_SLOTS: Final = 40

_WIDTHS: Final = (
    *(1, 5, 15, 30, 60, 300, 900, 1800, 3600, 3 * 3600, 6 * 3600, 12 * 3600),
    *(86_400, 2 * 86_400, 7 * 86_400, 30 * 86_400, 90 * 86_400, 365 * 86_400),
)
_STEPS: Final = 4
_GAP: Final = 2.0
_LEAST_HEIGHT: Final = 2.0


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


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a bar: ``y`` and ``height`` in pixels from the top of the plot."""

    kind: str
    y: float
    height: float


@dataclass(frozen=True, slots=True)
class Bar:
    """One slot: ``x`` and ``width`` in percent, and what its tooltip says."""

    x: float
    width: float
    segments: tuple[Segment, ...]
    title: str


@dataclass(frozen=True, slots=True)
class BarChart:
    """``grid`` are horizontal lines, each a height in pixels and its label; ``ticks`` stand below, in percent."""

    bars: tuple[Bar, ...]
    grid: tuple[tuple[float, str], ...]
    ticks: tuple[tuple[float, str], ...]


def cut(first: float, last: float) -> Slots:
    """Slots of a round width that hold both times, ``MOST_SLOTS`` at most."""
    for width in _WIDTHS:
        start = math.floor(first / width) * width
        number = math.floor((last - start) / width) + 1
        if number <= MOST_SLOTS:
            return Slots(start, width, number)
    width = math.ceil((last - first) / (MOST_SLOTS - 1))
    return Slots(first, width, math.floor((last - first) / width) + 1)


def draw_bars(slots: Slots, values: Sequence[dict[str, int]], titles: Iterable[str]) -> BarChart:
    """Stack the values of each slot, in the order of their keys, the first one at the bottom."""
    top = _round_up(max((sum(value.values()) for value in values), default=0))
    pitch = 100 / slots.number
    width = min(pitch * 0.8, 6.0)
    bars = tuple(
        Bar(
            round(slot * pitch + (pitch - width) / 2, 3),
            round(width, 3),
            _stack(value, top),
            f"{slots.label(slot)}: {title}",
        )
        for slot, (value, title) in enumerate(zip(values, titles, strict=True))
    )
    grid = tuple(
        (round(CHART_HEIGHT * (1 - step / _STEPS), 1), short_number(top * step / _STEPS)) for step in range(_STEPS + 1)
    )
    every = max(1, math.ceil(slots.number / 6))
    ticks = tuple((round((slot + 0.5) * pitch, 3), slots.label(slot)) for slot in range(0, slots.number, every))
    return BarChart(bars, grid, ticks)


def _stack(value: dict[str, int], top: int) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    base = float(CHART_HEIGHT)
    for kind, amount in value.items():
        if amount:
            height = max(_LEAST_HEIGHT, CHART_HEIGHT * amount / top)
            base -= height
            # A gap between segments tells them apart without their colours.
            drawn = height - _GAP if segments and height > 2 * _GAP else height
            segments.append(Segment(kind, round(max(0.0, base), 2), round(drawn, 2)))
    return tuple(segments)


def _round_up(value: int) -> int:
    """The next number that ``_STEPS`` lines divide into round numbers."""
    step = max(1, math.ceil(value / _STEPS))
    power: int = 10 ** (len(str(step)) - 1)
    return _STEPS * next(digit * power for digit in (1, 2, 3, 4, 5, 6, 8, 10) if digit * power >= step)


def short_number(value: float) -> str:
    """``950``, ``1.2k``, ``30M``."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:g}"
