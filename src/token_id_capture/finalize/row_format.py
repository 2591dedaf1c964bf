"""The choices of ``tokcap finalize`` about its rows, in a module that costs no time to load."""

from __future__ import annotations

from enum import StrEnum


class RowFormat(StrEnum):
    """What a row looks like."""

    RECORD = "record"
    TRAJECTORY = "trajectory"


class MaskedRows(StrEnum):
    """What becomes of a rollout that is masked as a whole. A masked sequence of a delivered one keeps its row."""

    KEEP = "keep"
    """A row without tokens."""
    DROP = "drop"
    """No row."""
    PLACEHOLDER = "placeholder"
    """A row with one token, whose loss mask is 0, for loaders that refuse empty sequences."""
