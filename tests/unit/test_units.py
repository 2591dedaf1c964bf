"""Durations and sizes, as people write and read them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from token_id_capture.cli.output.units import parse_duration, plural, show_bytes, show_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("14d", 1_209_600), ("36h", 129_600), ("90m", 5_400), ("0s", 0), ("1.5h", 5_400), ("2w", 1_209_600)],
)
def test_a_duration_is_a_number_and_a_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@given(st.text(max_size=6).filter(lambda text: not re.fullmatch(r"\s*[0-9.]+[smhdw]\s*", text)))
def test_anything_else_is_a_value_error_that_quotes_it(text: str) -> None:
    with pytest.raises(ValueError, match="90m, 36h or 14d") as refused:
        parse_duration(text)
    assert repr(text) in str(refused.value)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0s"), (-1, "0s"), (119, "119s"), (120, "2m"), (7_199, "119m"), (7_200, "2h"), (86_400 * 20.5, "20d")],
)
def test_a_duration_is_shown_in_the_largest_unit_that_says_enough(seconds: float, shown: str) -> None:
    assert show_duration(seconds) == shown


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 bytes"), (999, "999 bytes"), (1_000, "1.0 kB"), (999_949, "999.9 kB"), (999_950, "1.0 MB"),
        (1_500_000_000, "1.5 GB"), (2 * 10**15, "2000.0 TB"),
    ],
)  # fmt: skip
def test_a_size_is_shown_in_decimal_units(size: int, shown: str) -> None:
    assert show_bytes(size) == shown


def test_one_is_not_many() -> None:
    assert [plural(1, "call"), plural(0, "call"), plural(1204, "call")] == ["1 call", "0 calls", "1,204 calls"]
    assert plural(2, "process", "processes") == "2 processes"
