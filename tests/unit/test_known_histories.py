"""What is remembered of a conversation changes how fast it is read, and never what it says."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from token_id_capture.server.continuity.canonical import read_history
from token_id_capture.server.continuity.known_histories import KnownHistories


def _asked(words: str) -> dict[str, Any]:
    return {"role": "user", "content": words}


def _answer(argument: Any, identifier: str = "c1") -> dict[str, Any]:
    function = {"name": "look", "arguments": {"at": argument}}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": identifier, "function": function}]}


_RESULT = {"role": "tool", "tool_call_id": "c1", "content": "nothing"}
_ALIKE: list[Any] = [1, True, 1.5, 0.0, -0.0, None, math.nan, math.inf, "1", 2**70, [], {}, "\ud800"]
_messages = st.sampled_from([_asked("u"), _asked("v"), _RESULT, *map(_answer, _ALIKE), _answer(1, "c2")])


@given(st.lists(st.tuples(st.lists(_messages, min_size=1, max_size=5), st.sampled_from(["m", "n"])), max_size=6))
def test_a_conversation_reads_the_same_whatever_was_read_before(asked: list[tuple[list[Any], str]]) -> None:
    known = KnownHistories()
    for messages, model in asked:
        body = {"model": model, "messages": messages}
        assert known.read("r", body) == read_history(body)


def test_values_that_python_or_json_takes_for_the_same_are_told_apart() -> None:
    for before, value in product(_ALIKE, repeat=2):
        known = KnownHistories()
        known.read("r", {"messages": [_asked("u"), _answer(before), _RESULT]})
        body = {"messages": [_asked("u"), _answer(value), _RESULT, _answer(value), _RESULT]}
        assert known.read("r", body) == read_history(body)


def test_only_new_messages_are_read() -> None:
    known = KnownHistories()
    first = {"messages": [_asked("u"), _answer(1), _RESULT]}
    begun = known.read("r", first)
    longer = known.read("r", {"messages": [*first["messages"], _answer(2), _RESULT]})
    assert longer.answers[0] is begun.answers[0]
    assert known.read("another", first).answers[0] is not begun.answers[0]


def test_what_is_remembered_is_bounded() -> None:
    known = KnownHistories(capacity=20_000)
    for number in range(100):
        known.read(f"r{number}", {"messages": [_asked("word " * 300), _answer(1), _RESULT]})
    assert 0 < known.held <= 20_000
