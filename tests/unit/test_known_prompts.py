"""What is known of a rollout's prompts makes them quicker to read and write, and changes nothing of what they say."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from token_id_capture.server.wire.fast_parse import read_tokens
from token_id_capture.server.wire.prompt_cache import KnownTexts
from token_id_capture.tokens import TokenIds

ids = st.lists(st.sampled_from([1, 12, 123, 2, 21]), min_size=1, max_size=12)


@given(st.lists(ids, max_size=4), ids, st.sampled_from([b",", b", ", b" ,"]))
def test_an_array_is_read_and_written_the_same_whatever_came_before(
    before: list[list[int]], now: list[int], comma: bytes
) -> None:
    known = KnownTexts()
    for earlier in before:
        known.remember("r", orjson.dumps(earlier), TokenIds(earlier))
    text = orjson.dumps(now).replace(b",", comma)
    assert known.read("r", text) == now
    assert known.read("another", text) == now
    assert known.write("r", TokenIds(now)) == orjson.dumps(now)


@pytest.mark.parametrize("text", [b"[1,2,]", b"[1,2,x]", b"[1,2,true]", b"[1,2,-3]", b"[1,2", b"[1,2,3}"])
def test_what_is_no_array_of_ids_is_refused_also_where_its_beginning_is_known(text: bytes) -> None:
    known = KnownTexts()
    known.remember("r", b"[1,2,3,4]", TokenIds([1, 2, 3, 4]))
    with pytest.raises(ValueError):
        known.read("r", text)


@pytest.mark.parametrize(
    "answer",
    [
        {"count": 2, "max_model_len": 9, "tokens": [5, 6], "token_strs": None},
        {"tokens": [5, 6], "token_strs": ['"tokens":[1]', "]"]},
        {"other": {"tokens": [1]}, "tokens": [5, 6]},
        {"tokens": ["x]"]},
        {"tokens": None},
        {"prompt": "hello"},
        [],
    ],
)
def test_the_answer_of_a_tokenizer_endpoint_says_what_it_says_parsed_as_a_whole(answer: Any) -> None:
    known = KnownTexts()
    known.remember("r", b"[5,7]", TokenIds([5, 7]))
    parsed, text = read_tokens(orjson.dumps(answer), known, "r")
    assert parsed == answer
    assert text in (b"[5,6]", b"")
    assert read_tokens(orjson.dumps(answer, option=orjson.OPT_INDENT_2), known, "r") == (answer, b"")
    with pytest.raises(ValueError):
        read_tokens(b"{", known, "r")
