"""Assistant messages: the same item from a whole message and from the deltas of a stream, however it was cut."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from token_id_capture.server.wire.messages import MessageMerger, message_item

TEXT = st.text(max_size=12)
CALLS = st.lists(
    st.builds(
        lambda number, name, arguments: {
            "id": f"call-{number}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        },
        st.integers(0, 99),
        st.sampled_from(["get_weather", "f"]),
        st.one_of(TEXT, st.just('{ "a":1.0, "b" :"\\u00e9"}')),
    ),
    max_size=3,
)


def merged(*deltas: dict[str, Any]) -> dict[str, Any]:
    merger = MessageMerger()
    for delta in deltas:
        merger.add(delta)
    return message_item(merger.message())


def pieces(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


@given(content=TEXT, reasoning=TEXT, calls=CALLS, size=st.integers(1, 4))
def test_a_streamed_message_is_the_whole_one(
    content: str, reasoning: str, calls: list[dict[str, Any]], size: int
) -> None:
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning": piece} for piece in pieces(reasoning, size)]
    deltas += [{"content": piece, "tool_calls": None} for piece in pieces(content, size)]
    for index, call in enumerate(calls):
        function = {"name": call["function"]["name"], "arguments": ""}
        deltas.append({"content": None, "tool_calls": [{**call, "index": index, "function": function}]})
    # The arguments of parallel calls may come interleaved.
    longest = max((len(call["function"]["arguments"]) for call in calls), default=0)
    for start in range(0, longest, size):
        for index, call in enumerate(calls):
            piece = call["function"]["arguments"][start : start + size]
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    whole = {
        "role": "assistant",
        "content": content or None,
        "reasoning": reasoning or None,
        "tool_calls": calls,
        "refusal": None,
    }
    assert merged(*deltas) == message_item(whole)


def test_an_empty_message_has_an_empty_content_and_one_with_a_call_has_none() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert message_item({"role": "assistant", "content": None})["content"] == ""
    assert message_item({"role": "assistant", "content": "", "tool_calls": [call]})["content"] is None
    assert message_item({"content": "", "reasoning": "so"})["content"] is None


def test_token_arrays_and_members_that_say_nothing_are_left_out() -> None:
    message = {"role": "assistant", "content": "x", "generation_token_ids": [1], "audio": None, "annotations": []}
    assert message_item(message) == {"type": "message", "role": "assistant", "content": "x"}


def test_an_id_that_is_repeated_in_every_delta_is_not_joined() -> None:
    parts = [{"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": text}}]} for text in "{}"]
    (call,) = merged(*parts)["tool_calls"]
    assert call == {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
