"""Durations and sizes, as people write and read them."""

from __future__ import annotations

import re
from datetime import datetime
from time import time
from typing import Annotated

import typer

from token_id_capture.cli.options import fail

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhdw])", re.ASCII)


SinceOption = Annotated[
    str | None,
    typer.Option("--since", metavar="TIME", help="Only those opened since, as in 90m, 2d or 2026-11-29T18:00."),
]


def parse_duration(text: str) -> float:
    """Seconds of a duration such as ``90m``, ``36h`` or ``14d``.

    Raises:
        ValueError: it is none.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a duration: write a number and s, m, h, d or w, as in 90m, 36h or 14d")
    return float(match[1]) * _SECONDS[match[2]]


def show_duration(seconds: float) -> str:
    """The largest unit that leaves a whole number of at least 2, or seconds."""
    for unit in ("d", "h", "m"):
        if seconds >= 2 * _SECONDS[unit]:
            return f"{int(seconds // _SECONDS[unit])}{unit}"
    return f"{max(0, int(seconds))}s"


def show_bytes(size: int) -> str:
    """A number of bytes in the decimal units that disks are sold in."""
    if size < 1000:
        return f"{size} bytes"
    value = float(size)
    for unit in ("kB", "MB", "GB", "TB"):
        value /= 1000
        if value < 999.95 or unit == "TB":
            break
    return f"{value:.1f} {unit}"


def plural(count: int, noun: str, nouns: str = "") -> str:
    """``1 call``, ``1,204 calls``."""
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"


def since_option(since: str) -> float:
    """Seconds since the epoch of an age or of a date, local unless it names an offset; else ends the command."""
    if since[:1].isdigit() and since[-1:].isalpha() and since[-1] != "Z":
        try:
            return time() - parse_duration(since)
        except ValueError as error:
            fail(f"--since: {error}")
    try:
        return datetime.fromisoformat(since).timestamp()
    except (ValueError, OverflowError, OSError):
        fail(f"--since: {since!r} is neither an age, as in 90m, 36h or 14d, nor a date, as in 2026-11-29T18:00")
