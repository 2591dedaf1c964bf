"""A restated answer is recognised however it is written, and an edited one never is."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from token_id_capture.server.continuity import canonical
from token_id_capture.server.continuity.candidates import link_of
from token_id_capture.server.continuity.canonical import NotTextError, UnreadableHistoryError, read_history
from token_id_capture.server.engines.base import ChoiceTokens
from token_id_capture.server.wire.response import EngineChoice

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


def call(
    arguments: Any = '{"path": "a", "lines": 10000}', name: str = "look", identifier: str = "c1"
) -> dict[str, Any]:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


ASKED: dict[str, Any] = {
    "model": "m",
    "tools": TOOLS,
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Look."}],
}
ANSWER: dict[str, Any] = {
    "role": "assistant",
    "content": "I look.\n\n",
    "reasoning_content": "Where?",
    "tool_calls": [call()],
}


def chain_of(answer: dict[str, Any], **changed: Any) -> bytes:
    """The chain after an answer that a later request restates."""
    body = deepcopy({**ASKED, **changed})
    body["messages"] = [*body["messages"], answer, {"role": "tool", "tool_call_id": "c1", "content": "nothing"}]
    return read_history(body).answers[-1].chain


CAPTURED = read_history(ASKED).answered(ANSWER).chain


@pytest.mark.parametrize(
    "restated",
    [
        ANSWER,
        {**ANSWER, "content": "I look."},
        {**ANSWER, "content": [{"type": "text", "text": "I look."}]},
        {**ANSWER, "content": [{"type": "text", "text": "I "}, {"type": "text", "text": "look."}]},
        {**ANSWER, "tool_calls": [call('{"lines":1e4,"path":"a"}')]},
        {**ANSWER, "tool_calls": [call({"path": "a", "lines": 10000.0})]},
        {**ANSWER, "tool_calls": [call(identifier="another")]},
        {**ANSWER, "tool_calls": [{**call(), "index": 0, "cache_control": {"type": "ephemeral"}}]},
        {**ANSWER, "provider_specific_fields": {"x": 1}, "refusal": None, "annotations": []},
        {key: value for key, value in ANSWER.items() if key != "reasoning_content"},
        {**ANSWER, "reasoning_content": "Another thought"},  # compared apart from the chain
    ],
)
def test_an_answer_is_recognised_however_a_client_writes_it(restated: dict[str, Any]) -> None:
    assert chain_of(restated) == CAPTURED


@pytest.mark.parametrize(
    "edited",
    [
        {**ANSWER, "content": "I look!"},
        {**ANSWER, "content": "I  look."},
        {**ANSWER, "content": None},
        {**ANSWER, "tool_calls": []},
        {**ANSWER, "tool_calls": [call(), call()]},
        {**ANSWER, "tool_calls": [call(name="watch")]},
        {**ANSWER, "tool_calls": [call('{"path": "a", "lines": 10001}')]},
        {**ANSWER, "tool_calls": [call('{"path": "a", "lines": "10000"}')]},
        {**ANSWER, "tool_calls": [call('{"path": "a", "lines": true}')]},
        {**ANSWER, "tool_calls": [call('"{\\"path\\": \\"a\\", \\"lines\\": 10000}"')]},
    ],
)
def test_an_edited_answer_is_another_history(edited: dict[str, Any]) -> None:
    assert chain_of(edited) != CAPTURED


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "another"},
        {"tools": []},
        {"tools": [*TOOLS, *TOOLS]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "high"},
        {"messages": ASKED["messages"][1:]},
        {"messages": [{"role": "developer", "content": "Be brief."}, ASKED["messages"][1]]},
        {"messages": [{"role": "system", "content": "Be brief. "}, ASKED["messages"][1]]},
        {"messages": [ASKED["messages"][0], {"role": "user", "content": "Look.", "name": "Ann"}]},
        {"messages": [*ASKED["messages"], {"role": "user", "content": "Go on."}]},
    ],
)
def test_another_model_prompt_or_set_of_tools_is_another_history(changed: dict[str, Any]) -> None:
    assert chain_of(ANSWER, **changed) != CAPTURED


def test_what_only_steers_sampling_or_caching_is_the_same_history() -> None:
    cached = [{**TOOLS[0], "cache_control": {"type": "ephemeral"}}]
    reordered = [dict(reversed(TOOLS[0].items()))]
    assert chain_of(ANSWER, temperature=0.5, stream=True, tools=cached) == CAPTURED
    assert chain_of(ANSWER, tools=reordered, tool_choice="required") == CAPTURED


def test_the_result_of_a_call_belongs_to_the_place_of_the_call_and_not_to_its_id() -> None:
    def chain(first: str, second: str, *results: str) -> bytes:
        answer = {**ANSWER, "tool_calls": [call(identifier=first), call(identifier=second)]}
        told = [{"role": "tool", "tool_call_id": name, "content": "same"} for name in results]
        return read_history({**ASKED, "messages": [*ASKED["messages"], answer, *told]}).chain

    assert chain("c1", "c2", "c1", "c2") == chain("x", "y", "x", "y")
    assert chain("c1", "c2", "c1", "c2") != chain("c1", "c2", "c2", "c1")


def test_empty_arguments_are_an_empty_object_and_broken_ones_stay_text() -> None:
    def chain(arguments: Any) -> bytes:
        return chain_of({"role": "assistant", "tool_calls": [call(arguments)]})

    assert chain("") == chain("{}") == chain({}) == chain(None)
    assert len({chain('{"a": '), chain('{"a":'), chain('"{\\"a\\": "'), chain("{}")}) == 4


def test_reasoning_is_told_apart_from_none_whatever_field_carries_it() -> None:
    def reasoning(**fields: Any) -> bytes:
        return read_history(ASKED).answered({"role": "assistant", "content": "x", **fields}).reasoning

    assert reasoning() == reasoning(reasoning="", reasoning_content=None) == b""
    assert reasoning(reasoning="Hm.\n") == reasoning(reasoning_content="Hm.") != reasoning(reasoning="Oh.")
    assert len(reasoning(reasoning="Hm.")) == canonical.DIGEST_BYTES


@pytest.mark.parametrize(
    ("finish_reason", "stop", "ended"),
    [
        ("stop", None, True),
        ("stop", 151645, True),
        ("tool_calls", None, True),
        ("stop", "a stop string", False),
        ("length", None, False),
        ("abort", None, False),
        (None, None, False),
    ],
)
def test_a_policy_ended_its_turn_unless_a_limit_or_a_stop_string_did(
    finish_reason: str | None, stop: str | int | None, ended: bool
) -> None:
    link = link_of(read_history(ASKED), EngineChoice(ANSWER, finish_reason, ChoiceTokens(), stop))
    assert link is not None
    assert (link.chain, link.ended) == (CAPTURED, ended)


def test_a_chain_of_another_version_never_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canonical, "VERSION", canonical.VERSION + 1)
    assert chain_of(ANSWER) != CAPTURED


def test_each_answer_of_a_history_has_the_chain_that_its_capture_had() -> None:
    messages: list[dict[str, Any]] = list(ASKED["messages"])
    captured = []
    for turn in range(4):
        answer = {"role": "assistant", "content": f"Answer {turn}"}
        captured.append(read_history({**ASKED, "messages": messages}).answered(answer))
        messages += [answer, {"role": "user", "content": "Go on."}]
    assert [answer.chain for answer in read_history({**ASKED, "messages": messages}).answers] == [
        answer.chain for answer in captured
    ]
    assert [answer.position for answer in captured] == [2, 4, 6, 8]


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "data:"}}],
        [{"type": "input_audio"}],
        [{"type": "text"}],
        [7],
        {"a": 1},
    ],
)
def test_a_history_with_something_other_than_text_is_refused(content: Any) -> None:
    with pytest.raises(NotTextError):
        read_history({"messages": [{"role": "user", "content": content}]})


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hello",
        ["hello"],
        [{"content": "x"}],
        [{"role": 7}],
        [{"role": "assistant", "tool_calls": {"a": 1}}],
        [{"role": "assistant", "tool_calls": [None]}],
        [{"role": "assistant", "tool_calls": [{"function": "f"}]}],
    ],
)
def test_what_is_no_chat_is_refused(messages: Any) -> None:
    with pytest.raises(UnreadableHistoryError):
        read_history({"messages": messages})


def test_huge_numbers_and_text_that_is_no_unicode_have_chains_too() -> None:
    odd = [
        "1" * 400,
        '{"n": 1' + "0" * 400 + "}",
        '{"n": 123456789012345678901234567890}',
        '{"t": "\\ud800"}',
        "\ud800",
    ]
    chains = {chain_of({"role": "assistant", "content": "\ud800", "tool_calls": [call(text)]}) for text in odd}
    assert len(chains) == len(odd)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_arguments_are_the_same_in_every_spelling(value: dict[str, Any]) -> None:
    spellings = [
        json.dumps(value),
        json.dumps(value, ensure_ascii=False, indent=1),
        json.dumps(dict(reversed(value.items())), separators=(",", ":")),
    ]
    chains = {chain_of({"role": "assistant", "tool_calls": [call(arguments)]}) for arguments in (*spellings, value)}
    assert len(chains) == 1


@given(st.text(), st.text())
def test_different_texts_of_a_user_have_different_chains(one: str, other: str) -> None:
    def chain(text: str) -> bytes:
        return read_history({"messages": [{"role": "user", "content": text}]}).chain

    assert (chain(one) == chain(other)) == (one == other)
