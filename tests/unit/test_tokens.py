"""Packed sequences behave as the lists that they were made of, in less room and time."""

from __future__ import annotations

import copy
import math
import pickle
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from token_id_capture.errors import InvalidEntryError
from token_id_capture.tokens import LogProbs, TokenIds

ids = st.integers(0, 2**32 - 1) | st.integers(0, 2)
id_lists = st.lists(ids, max_size=12)
log_prob_lists = st.lists(st.floats(-1e6, 0.0, allow_nan=False), max_size=12)
slices = st.builds(
    slice,
    st.none() | st.integers(-15, 15),
    st.none() | st.integers(-15, 15),
    st.none() | st.sampled_from([1, 2, 3, -1, -2]),
)


@given(id_lists)
def test_ids_are_kept_as_four_little_endian_bytes_each(values: list[int]) -> None:
    packed = TokenIds(values)
    assert packed.tobytes() == struct.pack(f"<{len(values)}I", *values)
    assert TokenIds.from_bytes(packed.tobytes()) == packed
    assert packed.tolist() == list(packed) == values
    assert len(packed.buffer()) == 4 * len(values)


@given(log_prob_lists)
def test_log_probabilities_are_kept_as_eight_little_endian_bytes_each(values: list[float]) -> None:
    packed = LogProbs(values)
    assert packed.tobytes() == struct.pack(f"<{len(values)}d", *values)
    assert LogProbs.from_bytes(packed.tobytes()).tolist() == values
    # A double survives to its last bit, the sign of zero included.
    assert [math.copysign(1, value) for value in packed] == [math.copysign(1, value) for value in values]


@given(id_lists, slices, slices)
def test_slices_of_slices_are_those_of_a_list(values: list[int], first: slice, second: slice) -> None:
    assert TokenIds(values)[first].tolist() == values[first]
    assert TokenIds(values)[first][second].tolist() == values[first][second]


@given(id_lists, st.integers(-15, 15))
def test_an_index_is_that_of_a_list(values: list[int], index: int) -> None:
    packed = TokenIds(values)
    if -len(values) <= index < len(values):
        assert packed[index] == values[index]
    else:
        with pytest.raises(IndexError):
            packed[index]


@given(id_lists, id_lists)
def test_equality_and_hash_follow_the_items(first: list[int], second: list[int]) -> None:
    left, right = TokenIds(first), TokenIds(second)
    assert (left == right) == (first == second)
    assert (left == second) == (left == tuple(second)) == (left == array("I", second)) == (first == second)
    assert left == TokenIds([7, *first, 7])[1:-1]
    assert hash(left) == hash(TokenIds([7, *first, 7])[1:-1])


def test_nothing_else_is_equal() -> None:
    assert TokenIds([1]) != [1.5]
    assert TokenIds([1]) != [-1]
    assert TokenIds([1]) != ["1"]
    assert TokenIds([1]) != "1"
    assert TokenIds([]) != LogProbs([])
    assert TokenIds([1]) != [1, 2]


@given(id_lists, id_lists)
def test_a_prefix_is_found_exactly(first: list[int], second: list[int]) -> None:
    assert TokenIds(first).startswith(TokenIds(second)) == (first[: len(second)] == second)
    assert TokenIds(first + second).startswith(TokenIds(first))
    whole = TokenIds([9, *first, *second])
    assert whole[1:].startswith(whole[1 : 1 + len(first)])


@given(st.lists(st.integers(0, 1), max_size=5), st.lists(st.lists(st.integers(0, 1), max_size=2), max_size=3))
def test_a_prefix_may_come_in_parts(items: list[int], parts: list[list[int]]) -> None:
    joined = [token for part in parts for token in part]
    assert TokenIds(items).startswith(*map(TokenIds, parts)) == (items[: len(joined)] == joined)


@given(id_lists, st.integers(0, 12), st.integers(0, 12), st.integers(0, 2))
def test_parts_of_one_buffer_are_a_prefix_where_they_lie(items: list[int], end: int, more: int, start: int) -> None:
    whole = TokenIds(items)
    parts = whole[:end], whole[end : end + more]
    assert whole.startswith(*parts)
    assert whole[start:].startswith(*parts) == (items[start : start + end + more] == items[: end + more])


@given(st.lists(st.integers(0, 1), max_size=40), st.lists(st.integers(0, 1), max_size=40))
def test_the_common_prefix_is_as_long_as_counting_says(first: list[int], second: list[int]) -> None:
    counted = 0
    while counted < min(len(first), len(second)) and first[counted] == second[counted]:
        counted += 1
    assert TokenIds(first).common_prefix_length(TokenIds(second)) == counted
    assert TokenIds([5, *first])[1:].common_prefix_length(TokenIds(second)) == counted


@given(st.lists(id_lists, max_size=6), st.randoms())
def test_joined_sequences_are_the_joined_lists(pieces: list[list[int]], random: Any) -> None:
    parts = [TokenIds(piece) for piece in pieces]
    while len(parts) > 1:
        at = random.randrange(len(parts) - 1)
        parts[at : at + 2] = [TokenIds.joined(parts[at], parts[at + 1])]
    expected = [value for piece in pieces for value in piece]
    whole = parts[0] if parts else TokenIds()
    assert len(whole) == len(expected)
    assert whole.startswith(TokenIds(expected))
    assert whole == expected


def test_neighbours_in_one_buffer_are_joined_without_a_copy() -> None:
    base = TokenIds(range(100))
    joined = TokenIds.joined(base[10:20], base[20:30])
    assert joined.buffer().obj is base.buffer().obj
    assert joined == list(range(10, 30))
    assert TokenIds.joined(base[10:20], base[21:30]) == [*range(10, 20), *range(21, 30)]


def test_a_chain_of_joins_may_be_deeper_than_the_recursion_limit() -> None:
    left = right = TokenIds()
    for value in range(5000):
        left = TokenIds.joined(left, TokenIds([value]))
        right = TokenIds.joined(TokenIds([4999 - value]), right)
    assert left == right == list(range(5000))


def test_a_sum_of_a_sequence_and_a_list_is_a_sequence() -> None:
    first, more, wrong = TokenIds([1]), [2, 3], [-1]
    assert type(first + more) is TokenIds
    assert first + more == first + TokenIds(more) == [1, 2, 3]
    with pytest.raises(InvalidEntryError):
        first + wrong


@given(id_lists)
def test_copies_and_pickles_are_equal_and_own_their_items(values: list[int]) -> None:
    view = TokenIds([1, *values, 2])[1:-1]
    for twin in (TokenIds(view), copy.copy(view), copy.deepcopy(view), pickle.loads(pickle.dumps(view))):
        assert type(twin) is TokenIds
        assert twin == values
    assert len(pickle.dumps(TokenIds(range(1000))[:1])) < 500


def test_it_is_a_sequence_in_every_way() -> None:
    packed = TokenIds([5, 6, 5])
    assert isinstance(packed, Sequence)
    assert (5 in packed, 7 in packed, packed.index(6), packed.count(5)) == (True, False, 1, 2)
    assert list(reversed(packed)) == [5, 6, 5]
    assert repr(packed) == "TokenIds([5, 6, 5], length=3)"
    assert repr(TokenIds(range(20))) == "TokenIds([0, 1, 2, 3, 4, 5, 6, 7, ...], length=20)"
    with pytest.raises(TypeError):
        packed[0] = 1  # type: ignore[index]
    with pytest.raises(TypeError):
        packed.buffer()[0] = 1


@pytest.mark.parametrize("values", [[1, 2], (1, 2), range(1, 3), array("I", [1, 2]), array("q", [1, 2]), iter([1, 2])])
def test_any_iterable_of_integers_is_accepted(values: Any) -> None:
    assert TokenIds(values) == [1, 2]


class Integer:
    """What numeric libraries have: an integer of a type of their own."""

    def __index__(self) -> int:
        return 7


def test_integers_of_other_libraries_are_accepted() -> None:
    assert TokenIds([Integer()]) == [7]  # type: ignore[list-item]


@pytest.mark.parametrize(
    "values",
    [
        [-1],
        [2**32],
        [1.0],
        [1, None],
        ["1"],
        [[1]],
        "12",
        b"12",
        array("d", [1.0]),
        array("b", [-1]),
        LogProbs([-1.0]),
    ],
)
def test_what_is_no_token_id_is_refused(values: Any) -> None:
    with pytest.raises(InvalidEntryError, match="token ids must be"):
        TokenIds(values)


def test_booleans_are_the_integers_that_they_are_to_python() -> None:
    assert TokenIds([True, False, 5]) == [1, 0, 5]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([-0.5, math.nan], "log probability 1 is nan"),
        ([-math.inf], "log probability 0 is -inf"),
        ([math.inf, -math.inf], "log probability 0 is inf"),
        (array("d", [math.nan]), "log probability 0 is nan"),
        ([None], "must be numbers"),
        (["-0.5"], "must be numbers"),
        ([-(10**308)] * 20, "must be numbers"),
        ([-(10**400)], "must be numbers"),
        ("-1", "not text"),
        (b"-1", "not text"),
    ],
)
def test_what_is_no_log_probability_is_refused(values: Any, message: str) -> None:
    with pytest.raises(InvalidEntryError, match=message):
        LogProbs(values)


def test_log_probabilities_whose_sum_overflows_are_still_finite() -> None:
    assert LogProbs([-1.7e308, -1.7e308]) == [-1.7e308, -1.7e308]
    assert LogProbs([-1, 0]) == [-1.0, 0.0]


@pytest.mark.parametrize(("kind", "size"), [(TokenIds, 4), (LogProbs, 8)])
def test_bytes_that_do_not_divide_into_items_are_refused(kind: type[TokenIds] | type[LogProbs], size: int) -> None:
    assert len(kind.from_bytes(b"\0" * 3 * size)) == 3
    with pytest.raises(InvalidEntryError, match=f"{size + 1} bytes do not divide into items of {size} bytes"):
        kind.from_bytes(b"\0" * (size + 1))


def test_a_machine_of_the_other_byte_order_writes_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = TokenIds([1, 2**31])
    other = {"little": "big", "big": "little"}[sys.byteorder]
    stored = packed.tobytes()
    monkeypatch.setattr(sys, "byteorder", other)
    assert TokenIds.from_bytes(stored) == [2**24, 2**7], "read as that machine's hardware would hold it"
    assert TokenIds.from_bytes(stored).tobytes() == stored


class _Filled(list[Any]):
    """A list that gives out other items than C finds in it."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Any]:
        return iter([3, 4])


def test_a_list_that_gives_out_other_items_than_it_holds_is_packed_as_what_it_gives_out() -> None:
    assert TokenIds(_Filled()).tolist() == [3, 4]
    assert LogProbs(_Filled()).tolist() == [3.0, 4.0]
    assert LogProbs(_Filled([1, 2, 5])).tolist() == [3.0, 4.0]


@pytest.mark.parametrize("kind", [TokenIds, LogProbs])
def test_what_is_no_sequence_at_all_is_a_mistake_of_the_caller(kind: Any) -> None:
    for value in (None, 5, 1.5):
        with pytest.raises(TypeError, match="not iterable"):
            kind(value)
