"""The test policy is a true autoregressive model, and its template only ever appends."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import time
from collections import Counter
from itertools import repeat
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from token_id_capture.testing.policy import Policy
from token_id_capture.testing.template import (
    ARGUMENTS,
    END_OF_CALL,
    END_OF_TURN,
    TOOL_CALL,
    VOCABULARY_SIZE,
    TurnReader,
    decode,
    encode,
    render_chat,
)


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


LOOK_UP = tool("look_up", type="object", properties={"city": {"type": "string"}}, required=["city"])
TOOLS = [LOOK_UP, tool("look", properties={'a "b" é': {}}), tool("nothing")]
HELLO = [{"role": "user", "content": "hello"}]


def message_of(token_ids: list[int]) -> dict[str, Any]:
    reader = TurnReader(call_ids=repeat("call"))
    for token in token_ids:
        reader.feed(token)
    reader.finish()
    message: dict[str, Any] = {"role": "assistant", "content": reader.content or None}
    if reader.tool_calls:
        message["tool_calls"] = reader.tool_calls
    copied: dict[str, Any] = json.loads(json.dumps(message))
    return copied


def generate(prompt: list[int], **options: Any) -> list[int]:
    return [sampled.token_id for sampled in Policy().sample(prompt, **{"max_tokens": 400, **options})]


texts = st.text(max_size=20) | st.sampled_from(["<|end|>", "<tool_call>", "\ud800", "a\nb\r\n"])
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "tool", "developer"]), "content": texts}),
    min_size=1,
    max_size=4,
)


@given(history=messages, tools=st.sampled_from([None, TOOLS[:1], TOOLS]), seed=st.integers(0, 10**6), data=st.data())
def test_a_longer_history_extends_prompt_and_generation(
    history: list[dict[str, Any]], tools: list[Any] | None, seed: int, data: st.DataObject
) -> None:
    for _ in range(3):
        prompt = render_chat(history, tools)
        generated = generate(prompt, seed=seed, max_tokens=data.draw(st.integers(1, 60)))
        history = [*history, message_of(generated), {"role": "tool", "content": data.draw(texts)}]
        following = render_chat(history, tools)
        assert following[: len(prompt) + len(generated)] == prompt + generated


def test_the_generated_tokens_of_a_chain_are_never_in_the_template_of_the_next_turn_twice() -> None:
    prompt = render_chat(HELLO)
    generated = generate(prompt, seed=1)
    assert generated[-1] == END_OF_TURN
    following = render_chat([*HELLO, message_of(generated), {"role": "user", "content": "go on"}])
    rest = following[len(prompt) + len(generated) :]
    assert rest == render_chat([{"role": "user", "content": "go on"}])


@given(text=st.text())
def test_text_is_encoded_as_bytes_and_never_as_marks(text: str) -> None:
    assert all(token < 256 for token in encode(text))
    assert decode(encode(text)) == text.encode("utf-8", "replace").decode()


@given(tokens=st.lists(st.integers(0, VOCABULARY_SIZE - 1), max_size=20), seed=st.integers(0, 3))
@settings(max_examples=25)
def test_the_probabilities_of_the_whole_vocabulary_sum_to_one(tokens: list[int], seed: int) -> None:
    total = 0.0
    policy = Policy(seed)
    for token in range(VOCABULARY_SIZE):
        total += math.exp(policy.log_probs_of([*tokens, token])[-1])
    assert total == pytest.approx(1.0, abs=1e-12)


@given(seed=st.integers(0, 10**9), temperature=st.sampled_from([0, 0.3, 1.0, 2.0]), tools=st.booleans())
@settings(max_examples=50)
def test_teacher_forcing_gives_exactly_the_log_probs_of_sampling(seed: int, temperature: float, tools: bool) -> None:
    policy = Policy(7)
    prompt = render_chat(HELLO, TOOLS if tools else None)
    sampled = list(policy.sample(prompt, max_tokens=100, temperature=temperature, seed=seed))
    forced = policy.log_probs_of([*prompt, *(token.token_id for token in sampled)])[len(prompt) :]
    assert forced == [token.log_prob for token in sampled]
    assert all(math.isfinite(log_prob) for log_prob in forced)


def test_one_changed_token_changes_the_log_probs_after_it() -> None:
    policy = Policy()
    generated = generate(render_chat(HELLO), seed=3)
    right = policy.log_probs_of([*render_chat(HELLO), *generated])[-len(generated) :]
    for other in ("hallo", "hello ", "hell"):
        wrong = policy.log_probs_of([*render_chat([{"role": "user", "content": other}]), *generated])
        assert not any(map(math.isclose, right, wrong[-len(generated) :]))


def test_tokens_are_drawn_as_often_as_their_log_probs_say() -> None:
    policy = Policy()
    prompt = render_chat(HELLO)
    draws = 4000
    counts = Counter(next(policy.sample(prompt, max_tokens=1, seed=seed)).token_id for seed in range(draws))
    for token, count in counts.most_common(10):
        expected = math.exp(policy.log_probs_of([*prompt, token])[-1]) * draws
        assert abs(count - expected) < 5 * math.sqrt(expected)


def test_temperature_zero_takes_the_likeliest_token_whatever_the_seed() -> None:
    policy = Policy()
    first, second = (list(policy.sample(render_chat(HELLO), max_tokens=20, temperature=0, seed=s, top=3)) for s in "ab")
    assert first == second
    assert all(sampled.top[0] == (sampled.token_id, sampled.log_prob) for sampled in first)
    assert all(sampled.top[0][1] >= sampled.top[1][1] >= sampled.top[2][1] for sampled in first)


def test_equal_seeds_repeat_and_other_seeds_differ() -> None:
    prompt = render_chat(HELLO)
    assert generate(prompt, seed=5) == generate(prompt, seed=5)
    assert generate(prompt, seed=5) != generate(prompt, seed=6)
    assert Policy(1).log_probs_of([*prompt[:3], 97]) != Policy(2).log_probs_of([*prompt[:3], 97])


@pytest.mark.parametrize("definition", TOOLS, ids=lambda definition: definition["function"]["name"])
def test_a_tool_call_names_its_tool_and_its_arguments_are_json(definition: dict[str, Any]) -> None:
    name = definition["function"]["name"]
    seen = set()
    for seed in range(20):
        generated = generate(render_chat(HELLO, [definition]), seed=seed, forced=[TOOL_CALL])
        call = message_of(generated)["tool_calls"][0]
        assert call["function"]["name"] == name
        seen.add(call["function"]["arguments"])
        assert list(json.loads(call["function"]["arguments"])) == list(
            definition["function"]["parameters"].get("properties", {})
        )
    assert len(seen) > 1  # blanks are sampled, so a client that writes the JSON anew changes tokens


def test_all_tools_of_a_request_get_called() -> None:
    prompt = render_chat(HELLO, TOOLS)
    called = {
        call["function"]["name"]
        for seed in range(60)
        for call in message_of(generate(prompt, seed=seed, forced=[TOOL_CALL]))["tool_calls"]
    }
    assert called == {definition["function"]["name"] for definition in TOOLS}


def test_a_call_that_was_cut_off_is_reported_as_far_as_it_came() -> None:
    marks = [TOOL_CALL, *b"look_up", ARGUMENTS, *b'{"city": "o', END_OF_CALL]
    assert message_of(marks[:1])["tool_calls"][0]["function"] == {"name": "", "arguments": ""}
    assert message_of(marks[:4])["tool_calls"][0]["function"] == {"name": "loo", "arguments": ""}
    assert message_of(marks[:-1])["tool_calls"][0]["function"] == {"name": "look_up", "arguments": '{"city": "o'}


def test_without_tools_no_call_is_ever_made() -> None:
    assert not any(TOOL_CALL in generate(render_chat(HELLO), seed=seed) for seed in range(50))
    prompt = render_chat(HELLO, TOOLS)
    assert not any(TOOL_CALL in generate(prompt, seed=seed, banned={TOOL_CALL}) for seed in range(50))


def test_generation_ends_with_the_turn_or_at_the_limit() -> None:
    lengths = [len(generate(render_chat(HELLO), seed=seed)) for seed in range(100)]
    assert 10 < sum(lengths) / len(lengths) < 60
    assert len(generate(render_chat(HELLO), seed=0, max_tokens=1)) == 1


@pytest.mark.parametrize(
    ("messages", "tools", "part"),
    [
        (["hello"], None, r"messages\[0\]"),
        ([{"role": "narrator", "content": ""}], None, r"messages\[0\].*role"),
        ([*HELLO, {"role": "user", "content": 5}], None, r"messages\[1\]\.content"),
        ([{"role": "assistant", "tool_calls": [{}]}], None, r"messages\[0\]\.tool_calls"),
        (HELLO, [{"name": "bare"}], r"tools\[0\]\.function\.name"),
        (HELLO, [LOOK_UP, tool("größe")], r"tools\[1\]\.function\.name.*größe"),
    ],
)
def test_a_malformed_chat_is_refused_by_name(messages: list[Any], tools: list[Any] | None, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        render_chat(messages, tools)


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert render_chat([{"role": "user", "content": parts}]) == render_chat(HELLO)


@pytest.mark.parametrize("token", [-1, VOCABULARY_SIZE])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(ValueError, match=f"token {token} is outside"):
        Policy().log_probs_of([1, token])
    with pytest.raises(ValueError, match=f"token {token} is outside"):
        list(Policy().sample([token], max_tokens=1))


@given(tokens=st.lists(st.integers(0, VOCABULARY_SIZE - 1), max_size=300))
def test_any_sequence_of_tokens_can_be_read(tokens: list[int]) -> None:
    assert len(Policy().log_probs_of(tokens)) == len(tokens)


@pytest.mark.alone
def test_ten_thousand_tokens_are_scored_in_well_under_a_second() -> None:
    generator = random.Random(0)
    prompt = render_chat(HELLO, TOOLS)
    tokens = [*prompt, *generator.choices(range(97, 123), k=10_000 - len(prompt))]
    started = time.process_time()
    Policy().log_probs_of(tokens)
    assert time.process_time() - started < 1.0


def test_another_process_has_the_same_policy() -> None:
    tokens = [*render_chat(HELLO, TOOLS), *generate(render_chat(HELLO, TOOLS), seed=1)]
    program = f"from token_id_capture.testing.policy import Policy; print(Policy().log_probs_of({tokens}))"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert eval(printed, {"inf": math.inf}) == Policy().log_probs_of(tokens)
