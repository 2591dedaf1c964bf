"""The types of columns that are found from values: whatever a record holds can be written and read back."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from token_id_capture.outputs.columns import Column, Kind
from token_id_capture.outputs.parquet import Parquet
from token_id_capture.outputs.shapes import Shape


def column(*values: Any) -> tuple[str, list[Any]]:
    """The type of a column of these values, and what is read of it."""
    shape = Shape()
    for value in values:
        shape.add(value)
    stream = io.BytesIO()
    writer = Parquet(stream, [Column("found", Kind.FOUND, "", shape)])
    for value in values:
        writer.write(json.dumps({"found": value}).encode())
    writer.finish()
    table = parquet.read_table(io.BytesIO(stream.getvalue()))
    return str(table.schema.field("found").type), table.column("found").to_pylist()


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([True, None], "bool"),
        ([1, -(2**63), 2**63 - 1], "int64"),
        ([1, 0.5], "double"),
        (["ä", None, ""], "string"),
        ([None, None], "string"),
        ([[1, 2], [], None], "list<element: int64>"),
        ([[], []], "list<element: string>"),
        ([{"a": 1, "b": {"c": ["x"]}}], "struct<a: int64, b: struct<c: list<element: string>>>"),
        ([[{"a": 1}, {"a": 2}]], "list<element: struct<a: int64>>"),
    ],
)
def test_values_of_one_type_are_read_as_they_were(values: list[Any], kind: str) -> None:
    assert column(*values) == (kind, values)


def test_a_key_that_a_value_lacks_is_null() -> None:
    assert column({"a": 1}, {"b": 0.5}) == (
        "struct<a: int64, b: double>",
        [{"a": 1, "b": None}, {"a": None, "b": 0.5}],
    )


@pytest.mark.parametrize(
    "values",
    [
        [1, "1"],
        [2**63],
        [0.5, 2**60],
        ["\ud800"],
        [{"\udfff": 1}],
        [{"a": 1}, [1]],
        [{str(number): number for number in range(300)}],
        [True, 1],
    ],
)
def test_values_without_a_common_type_are_their_json(values: list[Any]) -> None:
    kind, read = column(*values)
    assert kind == "string"
    assert [json.loads(text) for text in read] == values


def test_an_object_without_keys_is_null_where_none_has_a_key() -> None:
    assert column({"a": {}, "b": 1}, {"a": {}, "b": 2}) == (
        "struct<a: string, b: int64>",
        [{"a": None, "b": 1}, {"a": None, "b": 2}],
    )
    assert column({}, {"a": 1})[1] == [{"a": None}, {"a": 1}]


def test_only_the_part_without_a_common_type_is_json() -> None:
    kind, read = column({"stop": "a", "n": 1}, {"stop": ["a"], "n": 2})
    assert kind == "struct<stop: string, n: int64>"
    assert read == [{"stop": '"a"', "n": 1}, {"stop": '["a"]', "n": 2}]


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=12,
)


@given(st.lists(ANY_JSON, min_size=1, max_size=5))
def test_any_json_can_be_written(values: list[Any]) -> None:
    _, read = column(*values)
    assert _same(values, read)


def _same(value: Any, found: Any) -> bool:
    """Whether what was read says the same: absent keys are null, and text may be JSON."""
    if value == {} and found is None:
        return True
    if isinstance(value, dict) and isinstance(found, dict):
        return all(_same(value.get(key), item) for key, item in found.items()) and set(value) <= set(found)
    if isinstance(value, list) and isinstance(found, list):
        return len(value) == len(found) and all(map(_same, value, found))
    return bool(value == found or (isinstance(found, str) and json.loads(found) == value))
