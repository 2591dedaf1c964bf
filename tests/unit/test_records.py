"""The record of a call: what it accepts, refuses and keeps, and how it is read out of a response."""

from __future__ import annotations

import json
import math
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from token_id_capture.errors import InvalidEntryError
from token_id_capture.records import (
    TOKEN_ENTRY_RECORD_SCHEMA_VERSION,
    TOKEN_FIELDS,
    TokenEntry,
    extract_token_fields,
    response_to_output_items,
    rollout_id_from_record,
    strip_token_fields,
    validate_rollout_id,
)
from token_id_capture.tokens import LogProbs, TokenIds

REQUIRED: dict[str, Any] = {
    "rollout_id": "0-1",
    "model_call_id": "c",
    "prompt_token_ids": [1, 2],
    "generation_token_ids": [3],
    "generation_log_probs": [-0.5],
}
TOKENS: dict[str, Any] = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.5]}


def test_an_entry_has_the_defaults_that_users_know() -> None:
    entry = TokenEntry(**REQUIRED)
    assert (entry.schema_version, entry.model, entry.routed_experts, entry.output_items) == (1, "", None, [])
    assert (entry.token_item_index, entry.created_at) == (None, 0.0)
    assert isinstance(entry.prompt_token_ids, TokenIds)
    assert isinstance(entry.generation_log_probs, LogProbs)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50)
@given(
    prompt=st.lists(st.integers(0, 2**32 - 1), max_size=20),
    generated=st.lists(st.tuples(st.integers(0, 2**32 - 1), st.floats(-1e9, 0.0)), max_size=20),
    content=st.dictionaries(st.text(), values, max_size=4),
    more=values,
)
def test_json_keeps_an_entry_to_the_last_bit(
    prompt: list[int], generated: list[tuple[int, float]], content: dict[str, Any], more: Any
) -> None:
    entry = TokenEntry(
        **{
            **REQUIRED,
            "prompt_token_ids": prompt,
            "generation_token_ids": [token for token, _ in generated],
            "generation_log_probs": [log_prob for _, log_prob in generated],
            "output_items": [content],
            "token_item_index": 0,
            "created_at": 1.7e9 + 0.1,
            "a_field_of_a_later_release": more,
        }
    )
    read = TokenEntry.model_validate_json(entry.model_dump_json())
    assert read == entry
    assert TokenEntry.model_validate(json.loads(json.dumps(entry.model_dump()))) == entry
    assert read.model_extra == {"a_field_of_a_later_release": more}


@pytest.mark.parametrize("values", [(1, 2), array("I", [1, 2]), TokenIds([1, 2]), range(1, 3)])
def test_ids_may_come_as_any_sequence(values: Any) -> None:
    assert TokenEntry(**{**REQUIRED, "prompt_token_ids": values}).prompt_token_ids == [1, 2]


def test_a_packed_sequence_is_taken_as_it_is() -> None:
    packed = TokenIds([1, 2])
    assert TokenEntry(**{**REQUIRED, "prompt_token_ids": packed}).prompt_token_ids is packed


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prompt_token_ids", [-1], "prompt_token_ids"),
        ("prompt_token_ids", [2**32], "prompt_token_ids"),
        ("prompt_token_ids", [1.0], "prompt_token_ids"),
        ("prompt_token_ids", "12", "not a sequence of numbers"),
        ("prompt_token_ids", {"1": 2}, "not a sequence of numbers"),
        ("prompt_token_ids", {1, 2}, "not a sequence of numbers"),
        ("prompt_token_ids", None, "not a sequence of numbers"),
        ("generation_token_ids", [3, None], "generation_token_ids"),
        ("generation_token_ids", [3, 4], "must have the same length, not 2 and 1"),
        ("generation_log_probs", [], "must have the same length, not 1 and 0"),
        ("generation_log_probs", [math.nan], "log probability 0 is nan"),
        ("generation_log_probs", [-math.inf], "log probability 0 is -inf"),
        ("generation_log_probs", [None], "generation_log_probs"),
        ("token_item_index", 0, "token_item_index 0 is outside output_items, which has 0"),
        ("token_item_index", -1, "token_item_index -1 is outside"),
        ("created_at", math.nan, "created_at"),
        ("model_call_id", "", "model_call_id"),
        ("model_call_id", "c" * 201, "model_call_id"),
        ("rollout_id", "../etc", "invalid rollout id"),
        ("schema_version", TOKEN_ENTRY_RECORD_SCHEMA_VERSION + 1, "upgrade token-id-capture"),
        ("schema_version", 0, "not 0"),
    ],
)
def test_what_nobody_could_train_on_is_refused_and_the_field_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message) as refused:
        TokenEntry(**{**REQUIRED, field: value})
    assert isinstance(refused.value, ValueError)


@pytest.mark.parametrize("text", ['{"prompt_token_ids": [1e0]}', '{"prompt_token_ids": [null]}'])
def test_json_is_held_to_the_same_rules(text: str) -> None:
    with pytest.raises(ValidationError, match="prompt_token_ids"):
        TokenEntry.model_validate_json(json.dumps({**REQUIRED, **json.loads(text)}))


def test_the_json_schema_says_what_the_arrays_hold() -> None:
    properties = TokenEntry.model_json_schema()["properties"]
    assert properties["prompt_token_ids"]["items"] == {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}
    assert properties["generation_log_probs"]["items"] == {"type": "number"}


# Rollout ids


@pytest.mark.parametrize("rollout_id", ["0-1", "a", "Z9", "task.7_b-a3", "x" * 200])
def test_a_rollout_id_is_returned_unchanged(rollout_id: str) -> None:
    assert validate_rollout_id(rollout_id) == rollout_id


@pytest.mark.parametrize(
    "rollout_id",
    ["", "-a", ".a", "_a", "a/b", "a b", "a\n", "\n", "a%2Fb", "ä", "a\0", "x" * 201, None, 7, b"a", ["a"]],
)
def test_a_malformed_rollout_id_is_refused_and_never_repaired(rollout_id: Any) -> None:
    with pytest.raises(ValueError, match="invalid rollout id") as refused:
        validate_rollout_id(rollout_id)
    assert len(str(refused.value)) < 250


@given(st.text(max_size=12))
def test_an_accepted_id_has_only_what_a_path_and_a_file_name_can_hold(text: str) -> None:
    try:
        validate_rollout_id(text)
    except ValueError:
        return
    assert text.isascii()
    assert text[0].isalnum()
    assert set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"_ng_rollout_id": "mine"}, "mine"),
        ({"_ng_rollout_id": "mine", "_ng_task_index": 1, "_ng_rollout_index": 2}, "mine"),
        ({"_ng_task_index": 1, "_ng_rollout_index": 0}, "1-0"),
        ({"_ng_task_index": 0, "_ng_rollout_index": 0, "_ng_attempt_index": 0}, "0-0"),
        ({"_ng_task_index": 0, "_ng_rollout_index": 0, "_ng_attempt_index": 2}, "0-0-a2"),
        ({"_ng_rollout_id": "mine", "_ng_attempt_index": 1}, "mine-a1"),
        ({"_ng_task_index": 1}, None),
        ({"_ng_rollout_index": 1, "_ng_attempt_index": 4}, None),
        ({"_ng_rollout_id": None, "_ng_task_index": None}, None),
        ({}, None),
    ],
)
def test_a_record_names_its_rollout(record: dict[str, Any], expected: str | None) -> None:
    assert rollout_id_from_record(record) == expected


@pytest.mark.parametrize(
    "record",
    [
        {"_ng_rollout_id": ""},
        {"_ng_rollout_id": 7},
        {"_ng_rollout_id": "a/b", "_ng_task_index": 1, "_ng_rollout_index": 1},
        {"_ng_task_index": "1", "_ng_rollout_index": 0},
        {"_ng_task_index": True, "_ng_rollout_index": 0},
        {"_ng_task_index": -1, "_ng_rollout_index": 0},
        {"_ng_task_index": 1, "_ng_rollout_index": 1.0},
        {"_ng_rollout_id": "mine", "_ng_attempt_index": "1"},
        {"_ng_rollout_id": "x" * 200, "_ng_attempt_index": 1},
    ],
)
def test_a_record_with_a_malformed_name_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        rollout_id_from_record(record)


# Reading a response


def responses_shape(*items: dict[str, Any]) -> dict[str, Any]:
    return {"object": "response", "output": list(items)}


def chat_shape(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [{"index": index, "message": message} for index, message in enumerate(messages)]}


@pytest.mark.parametrize("shape", [responses_shape, chat_shape])
def test_the_one_carrier_of_a_response_is_found(shape: Any) -> None:
    carrier = {"role": "assistant", "content": "x", **TOKENS, "routed_experts": "AA=="}
    fields = extract_token_fields(shape({"role": "assistant", "content": "y"}, carrier))
    assert fields == {**TOKENS, "routed_experts": "AA=="}
    assert set(fields) == set(TOKEN_FIELDS)
    assert extract_token_fields(shape({**TOKENS})) == {**TOKENS, "routed_experts": None}


@pytest.mark.parametrize(
    "response",
    [
        {},
        {"output": None, "choices": None},
        {"output": "text", "choices": [None, "x", {"message": None}, {}]},
        responses_shape({"type": "message"}, {"type": "reasoning", "routed_experts": "AA=="}),
        chat_shape({"content": "x", "prompt_token_ids": None}),
    ],
)
def test_a_response_without_arrays_has_none(response: dict[str, Any]) -> None:
    assert extract_token_fields(response) is None
    assert response_to_output_items(response)[1] is None


def test_an_empty_generation_is_an_array_and_no_absence() -> None:
    empty = {"prompt_token_ids": [1], "generation_token_ids": [], "generation_log_probs": []}
    assert extract_token_fields(chat_shape(empty)) == {**empty, "routed_experts": None}


@pytest.mark.parametrize("missing", ["prompt_token_ids", "generation_token_ids", "generation_log_probs"])
def test_a_partial_carrier_is_refused_by_what_it_lacks(missing: str) -> None:
    for value in ({}, {missing: None}):
        partial = {key: array for key, array in TOKENS.items() if key != missing} | value
        with pytest.raises(InvalidEntryError, match=f"lacks {missing}"):
            extract_token_fields(responses_shape(partial))


def test_two_carriers_are_refused() -> None:
    with pytest.raises(InvalidEntryError, match=r"multiple response items \(2\)"):
        extract_token_fields(responses_shape({**TOKENS}, {"generation_token_ids": [1]}))
    with pytest.raises(InvalidEntryError, match="multiple"):
        extract_token_fields({**responses_shape({**TOKENS}), **chat_shape({**TOKENS})})


def test_content_items_have_no_arrays_and_the_carrier_is_pointed_at() -> None:
    call = {"type": "function_call", "name": "ls", "arguments": '{ "b":1.0,"a":"\\u00e9" }'}
    response = responses_shape({"type": "reasoning"}, {**call, **TOKENS, "routed_experts": "AA=="})
    assert response_to_output_items(response) == ([{"type": "reasoning"}, call], 1)
    assert response["output"][1]["generation_token_ids"] == [2], "the response itself is untouched"


def test_a_chat_message_becomes_an_item_with_all_that_it_had() -> None:
    tool_calls = [{"id": "t", "function": {"name": "ls", "arguments": '{"b" : 1}'}}]
    message = {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": tool_calls}
    items, index = response_to_output_items(chat_shape({**message, **TOKENS}))
    assert (items, index) == ([{"type": "message", **message}], 0)


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from([*TOKEN_FIELDS, "type", "content", "role"]), values))
def test_stripping_takes_the_token_fields_and_nothing_else(item: dict[str, Any]) -> None:
    stripped = strip_token_fields(item)
    assert not set(stripped) & set(TOKEN_FIELDS)
    assert {**item, **stripped} == item
    assert set(item) - set(stripped) <= set(TOKEN_FIELDS)
