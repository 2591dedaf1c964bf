"""A response, what its client echoes of it, and the next chat body: the same assistant message as it was generated."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.dialect_streams import MODEL
from token_id_capture.provenance import StoredAnswer
from token_id_capture.server.dialects.chat import ChatRequest, Dialect, History, TranslationOptions, read_generation
from token_id_capture.server.dialects.paths import Target
from token_id_capture.server.dialects.translate import read_request, translated_response
from token_id_capture.server.translation.answers import AnswerMemory

LETTERS = st.characters(codec="utf-8", exclude_categories=["Cs"])
TEXTS = st.text(LETTERS, max_size=8)
SPACES = st.sampled_from(["", " ", "\n\n", "  \n"])
NUMBERS = st.integers(-(2**53), 2**53) | st.integers(-99, 99).map(float)
VALUES = st.recursive(
    TEXTS | NUMBERS | st.booleans() | st.none(), lambda inner: st.lists(inner, max_size=2), max_leaves=3
)
ARGUMENTS = st.dictionaries(TEXTS, VALUES, max_size=3)


@st.composite
def answers(draw: st.DrawFn, least_calls: int = 0) -> dict[str, Any]:
    """An assistant message as a policy writes it: odd white space, keys in any order, escapes."""
    message: dict[str, Any] = {"role": "assistant", "content": draw(SPACES) + draw(TEXTS) + draw(SPACES)}
    if reasoning := draw(TEXTS):
        message["reasoning_content"] = reasoning + draw(SPACES)
    count = draw(st.integers(least_calls, 3))
    calls = []
    for index in range(count):
        separators = draw(st.sampled_from([(", ", ": "), (",", ":"), (" , ", " :  ")]))
        arguments = json.dumps(draw(ARGUMENTS), ensure_ascii=draw(st.booleans()), separators=separators)
        calls.append({"id": f"call-{index}", "type": "function", "function": {"name": "look", "arguments": arguments}})
    if calls:
        message["tool_calls"] = calls
    return message


def shown(dialect: Dialect, message: dict[str, Any]) -> dict[str, Any]:
    generation = read_generation({"choices": [{"message": message, "finish_reason": "stop"}]}, "shown")
    assert generation is not None
    return translated_response(generation, ChatRequest(dialect, {}, MODEL), "shown")


def rebuilt(value: Any) -> Any:
    """A JSON value as a client of JavaScript writes it: keys in another order, whole doubles as integers."""
    if isinstance(value, dict):
        return {key: rebuilt(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [rebuilt(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def echo(dialect: Dialect, response: dict[str, Any], *, drops_thoughts: bool, strips: bool) -> Any:
    """What a client sends back of a response in its history, and results of its calls."""
    if dialect is Dialect.MESSAGES:
        blocks = [dict(block) for block in response["content"]]
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = rebuilt(block["input"])
            elif block["type"] == "text" and strips:
                block["text"] = block["text"].strip()
        blocks = [block for block in blocks if not (drops_thoughts and block["type"] == "thinking")]
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "x"}
            for block in blocks
            if block["type"] == "tool_use"
        ]
        user = {"role": "user", "content": [*results, {"type": "text", "text": "and now?"}]}
        turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": blocks}, user]
        return {"model": "m", "max_tokens": 9, "messages": turns}
    if dialect is Dialect.RESPONSES:
        items = []
        for item in response["output"]:
            kept = dict(item)
            if kept["type"] == "reasoning":
                kept["content"] = []  # as OpenCode does
                if drops_thoughts:
                    continue
            elif kept["type"] == "message" and strips:
                kept["content"] = [{**part, "text": part["text"].strip()} for part in kept["content"]]
            elif kept["type"] == "function_call":
                kept["arguments"] = json.dumps(rebuilt(json.loads(kept["arguments"])))
            items.append(kept)
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "x"}
            for item in items
            if item["type"] == "function_call"
        ]
        user = {"role": "user", "content": "and now?"}
        return {"model": "m", "input": [{"role": "user", "content": "hi"}, *items, *results, user]}
    parts = []
    for part in response["candidates"][0]["content"]["parts"]:
        kept = dict(part)
        if kept.get("thought"):
            continue  # as Gemini CLI does
        if drops_thoughts:
            kept.pop("thoughtSignature", None)
        if "functionCall" in kept:
            kept["functionCall"] = {**kept["functionCall"], "args": rebuilt(kept["functionCall"]["args"])}
        elif strips:
            kept["text"] = kept["text"].strip()
        parts.append(kept)
    results = [
        {"functionResponse": {"id": part["functionCall"]["id"], "name": "look", "response": {"output": "x"}}}
        for part in parts
        if "functionCall" in part
    ]
    user = {"role": "user", "parts": [*results, {"text": "and now?"}]}
    return {"contents": [{"role": "user", "parts": [{"text": "hi"}]}, {"role": "model", "parts": parts}, user]}


class Stored:
    """A rollout of one call."""

    def __init__(self, message: dict[str, Any]) -> None:
        self.message = message

    async def answers_since(self, rollout_id: str, order: int) -> list[StoredAnswer]:
        return [] if order else [StoredAnswer(1, self.message)]


async def next_message(dialect: Dialect, message: dict[str, Any], history: History, **echoed: bool) -> dict[str, Any]:
    """The assistant message of the request that follows."""
    body = echo(dialect, shown(dialect, message), **echoed)
    request = read_request(Target(dialect, model="m"), body, TranslationOptions(history=history))
    await AnswerMemory(Stored(message)).restore("r", request.body["messages"], history)
    found: dict[str, Any]
    (found,) = [one for one in request.body["messages"] if one["role"] == "assistant"]
    return found


def expected(message: dict[str, Any], *, reasoning: bool = True) -> dict[str, Any]:
    said = {**message, "content": message["content"] or (None if "tool_calls" in message else "")}
    if not reasoning:
        said.pop("reasoning_content", None)
    return said


DIALECTS = pytest.mark.parametrize("dialect", list(Dialect))
BLANK_THOUGHTS: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "\r",
    "tool_calls": [{"id": "call-0", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
}


@DIALECTS
@settings(max_examples=40)
@given(answers(least_calls=1), st.booleans(), st.booleans())
@example(BLANK_THOUGHTS, True, False)
async def test_under_full_the_next_prompt_has_the_answer_as_it_was_generated(
    dialect: Dialect, message: dict[str, Any], drops_thoughts: bool, strips: bool
) -> None:
    found = await next_message(dialect, message, History.FULL, drops_thoughts=drops_thoughts, strips=strips)
    assert found == expected(message)


@DIALECTS
@settings(max_examples=40)
@given(answers(least_calls=1), st.booleans(), st.booleans())
@example(BLANK_THOUGHTS, True, False)
async def test_under_exact_it_lacks_what_the_client_dropped_and_nothing_else(
    dialect: Dialect, message: dict[str, Any], drops_thoughts: bool, strips: bool
) -> None:
    found = await next_message(dialect, message, History.EXACT, drops_thoughts=drops_thoughts, strips=strips)
    assert found == expected(message, reasoning=not drops_thoughts)


@DIALECTS
@settings(max_examples=40)
@given(answers())
async def test_what_a_client_sends_back_as_it_came_is_the_answer_without_any_memory(
    dialect: Dialect, message: dict[str, Any]
) -> None:
    body = echo(dialect, shown(dialect, message), drops_thoughts=False, strips=False)
    request = read_request(Target(dialect, model="m"), body, TranslationOptions())
    (found,) = [one for one in request.body["messages"] if one["role"] == "assistant"]
    wanted = expected(message)
    assert (found["content"], found.get("reasoning_content")) == (wanted["content"], wanted.get("reasoning_content"))
    values = [
        [json.loads(call["function"]["arguments"]) for call in one.get("tool_calls", ())] for one in (found, wanted)
    ]
    assert values[0] == values[1]
