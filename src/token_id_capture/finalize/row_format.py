"""The choice of ``tokcap finalize --format``, in a module that costs no time to load."""

from __future__ import annotations

from enum import StrEnum


class RowFormat(StrEnum):
    """What a row looks like."""

    RECORD = "record"
    TRAJECTORY = "trajectory"
