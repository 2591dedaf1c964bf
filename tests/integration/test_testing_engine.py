"""The test engine speaks as vLLM does: its responses are held against recorded ones, key by key."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from support.engine_client import HELLO, Client, events
from token_id_capture.testing.engine import PolicyEngine
from token_id_capture.testing.policy import Policy
from token_id_capture.testing.serving import engine_in_thread, serve_engine
from token_id_capture.testing.template import END_OF_THOUGHT, END_OF_TURN, THINK, Habits, encode, render_chat

RECORDINGS = Path(__file__).parent.parent / "data" / "recordings" / "vllm-0.32.0"
CAPTURED = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def engine_url() -> Iterator[str]:
    with engine_in_thread(PolicyEngine(model="tiny", max_model_len=1024)) as url:
        yield url


@pytest.fixture
async def client(engine_url: str) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession() as session:
        yield Client(engine_url, session)


def recorded(name: str) -> tuple[dict[str, Any], Any]:
    """A recorded request and its response: the parsed body, or the events of a stream."""
    request = json.loads((RECORDINGS / f"{name}.request.json").read_text())
    stream = RECORDINGS / f"{name}.response.sse"
    response = (
        stream.read_bytes() if stream.exists() else json.loads((RECORDINGS / f"{name}.response.json").read_text())
    )
    return request, events(response) if isinstance(response, bytes) else response


def shape(value: Any) -> Any:
    """A response without its values: keys in order, nulls, and the types of everything else."""
    if isinstance(value, dict):
        if value and set(map(type, value.values())) == {float}:
            return "log probs by token"
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        kinds = {json.dumps(shape(item)) for item in value}
        return ["several" if len(kinds) > 1 else kinds.pop()] if value else []
    return type(value).__name__


def assert_same_shape(ours: Any, theirs: Any) -> None:
    assert json.dumps(shape(ours), indent=1) == json.dumps(shape(theirs), indent=1)


@pytest.mark.parametrize(
    "name",
    [
        "01-chat",
        "04-completion",
        "04c-completion-token-prompt",
        "04d-completion-two-prompts-n2",
        "06-chat-n2",
        "17-chat-nothing-asked",
        "26-chat-top-logprobs-3",
    ],
)
async def test_a_response_has_the_shape_of_vllm(client: Client, name: str) -> None:
    request, response = recorded(name)
    if isinstance(request["body"].get("prompt"), list) and isinstance(request["body"]["prompt"][0], int):
        request["body"]["prompt"] = [35, 41, 62]  # the recorded ids are another vocabulary's
    status, ours = await client.post(request["path"], request["body"])
    assert status == 200
    assert len(ours["choices"]) == len(response["body"]["choices"])
    assert_same_shape(ours, response["body"])


@pytest.mark.parametrize(
    "name",
    [
        "02-chat-stream-usage",
        "03-chat-stream",
        "05-completion-stream",
        "05b-completion-stream-n2",
        "07-chat-n2-stream",
        "17e-chat-ids-only-stream",
    ],
)
async def test_a_stream_has_the_chunks_of_vllm(client: Client, name: str) -> None:
    request, response = recorded(name)
    # A turn that reaches its end sends every kind of chunk; one that is cut off lacks one.
    ours = await client.events(request["path"], {**request["body"], "max_tokens": 900})
    assert [json.dumps(kind) for kind in kinds(ours)] == [json.dumps(kind) for kind in kinds(response)]


def kinds(chunks: list[dict[str, Any]]) -> list[Any]:
    """The different shapes of a stream's chunks, in the order of their first appearance."""
    found: list[Any] = []
    for chunk in chunks:
        chunk_shape = shape(chunk)
        if json.dumps(chunk_shape) not in map(json.dumps, found):
            found.append(chunk_shape)
    return found


async def tool_call(client: Client, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The first seed whose answer calls one tool and says nothing, and that answer."""
    for seed in range(50):
        response = await client.chat({**body, "seed": seed, "stream": False, "max_tokens": 300})
        message = response["choices"][0]["message"]
        if message["content"] is None and len(message["tool_calls"]) == 1:
            return seed, response
    raise AssertionError("no seed below 50 calls a tool")


async def test_a_tool_call_has_the_shape_of_vllm(client: Client) -> None:
    request, response = recorded("12b-tools-auto-call")
    _, ours = await tool_call(client, request["body"])
    assert_same_shape(ours, response["body"])
    assert ours["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_streamed_tool_call_has_the_chunks_of_vllm(client: Client) -> None:
    request, response = recorded("13b-tools-auto-call-stream")
    seed, whole = await tool_call(client, request["body"])
    ours = await client.events(request["path"], {**request["body"], "seed": seed, "max_tokens": 300})
    assert [json.dumps(kind) for kind in kinds(ours)] == [json.dumps(kind) for kind in kinds(response)]
    calls = [call for chunk in ours for choice in chunk["choices"] for call in choice["delta"].get("tool_calls", [])]
    arguments = "".join(call["function"].get("arguments", "") for call in calls)
    assert arguments == whole["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]


async def test_a_stream_without_ids_sends_only_text(client: Client) -> None:
    request, _ = recorded("17b-chat-nothing-asked-stream")
    ours = await client.events(request["path"], {**request["body"], "max_tokens": 900})
    assert ours[0]["prompt_token_ids"] is None
    for chunk in ours[1:-1]:
        (choice,) = chunk["choices"]
        assert choice["token_ids"] is None
        assert choice["logprobs"] is None
        assert choice["delta"].get("content") or choice["finish_reason"]


@pytest.mark.parametrize("tools", [None, [TOOL]])
async def test_a_stream_and_a_whole_response_of_one_seed_say_the_same(client: Client, tools: list[Any] | None) -> None:
    for seed in range(5):
        body = {**HELLO, **CAPTURED, "seed": seed, "tools": tools}
        whole = (await client.chat(body))["choices"][0]
        chunks = await client.events("/v1/chat/completions", body)
        streamed = [choice for chunk in chunks[1:] for choice in chunk["choices"]]
        assert [token for choice in streamed for token in choice["token_ids"]] == whole["token_ids"]
        logprobs = [entry for choice in streamed for entry in choice["logprobs"]["content"]]
        assert logprobs == whole["logprobs"]["content"]
        text = "".join(choice["delta"].get("content") or "" for choice in streamed)
        assert text == (whole["message"]["content"] or "")
        assert streamed[-1]["finish_reason"] == whole["finish_reason"]


@pytest.mark.parametrize("temperature", [0, 0.5, 1.0])
async def test_the_served_log_probs_are_those_of_teacher_forcing(client: Client, temperature: float) -> None:
    response = await client.chat({**HELLO, **CAPTURED, "temperature": temperature, "tools": [TOOL], "n": 3})
    assert response["prompt_token_ids"] == render_chat(HELLO["messages"], [TOOL])
    for choice in response["choices"]:
        sequence = [*response["prompt_token_ids"], *choice["token_ids"]]
        served = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert served == Policy().log_probs_of(sequence)[-len(served) :]
    assert response["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in response["choices"])


async def test_every_turn_of_an_agent_with_tools_extends_the_turn_before(client: Client) -> None:
    agent = openai.AsyncOpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "Where is it warm?"}]
    before: list[int] = []
    called = 0
    for turn in range(8):
        response = await agent.chat.completions.create(
            model="tiny",
            messages=messages,
            tools=[TOOL],
            seed=turn,
            max_tokens=40,
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
        extra, choice_extra = response.model_extra, response.choices[0].model_extra
        assert extra is not None
        assert choice_extra is not None
        prompt = extra["prompt_token_ids"]
        assert prompt[: len(before)] == before
        before = [*prompt, *choice_extra["token_ids"]]
        message = response.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        called += len(message.tool_calls or [])
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "21 °C"} for call in message.tool_calls or []]
        if not message.tool_calls:
            messages.append({"role": "user", "content": "Go on."})
    await agent.close()
    assert called


async def test_a_call_of_a_given_tool_is_forced_and_a_forbidden_one_is_not_made(client: Client) -> None:
    named = {"type": "function", "function": {"name": "look_up"}}
    for choice in ("required", named):
        response = await client.chat({**HELLO, "tools": [TOOL], "tool_choice": choice})
        assert response["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "look_up"
    for seed in range(10):
        response = await client.chat({**HELLO, "tools": [TOOL], "tool_choice": "none", "seed": seed})
        assert "tool_calls" not in response["choices"][0]["message"]
    status, _ = await client.post("/v1/chat/completions", {**HELLO, "tool_choice": "required"})
    assert status == 400


async def test_without_a_seed_answers_differ_and_with_one_they_repeat(client: Client) -> None:
    open_ended = {**HELLO, **CAPTURED, "seed": None}
    first, second = await client.chat(open_ended), await client.chat(open_ended)
    assert first["choices"][0]["token_ids"] != second["choices"][0]["token_ids"]
    first, second = await client.chat({**HELLO, **CAPTURED}), await client.chat({**HELLO, **CAPTURED})
    assert first["choices"] == second["choices"]


async def test_a_limit_ends_a_turn_and_so_does_the_end_of_turn(client: Client) -> None:
    limited = (await client.chat({**HELLO, **CAPTURED, "max_tokens": 1, "seed": 2}))["choices"][0]
    assert limited["finish_reason"] == "length"
    ended = (await client.chat({**HELLO, **CAPTURED, "max_tokens": None}))["choices"][0]
    assert ended["finish_reason"] == "stop"
    assert ended["token_ids"][-1] == END_OF_TURN
    assert END_OF_TURN not in ended["token_ids"][:-1]


async def test_tokens_can_be_shown_as_ids(client: Client) -> None:
    choice = (await client.chat({**HELLO, **CAPTURED, "return_tokens_as_token_ids": True}))["choices"][0]
    shown = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert shown == [f"token_id:{token}" for token in choice["token_ids"]]


@pytest.mark.parametrize(
    "name",
    [
        "18c-error-max-tokens-0",
        "18d-error-unknown-model",
        "18e-error-malformed-json",
        "18f-error-top-logprobs",
        "18g-error-method",
        "18h-error-no-route",
        "18i-error-no-messages",
    ],
)
async def test_a_refusal_is_word_for_word_that_of_vllm(client: Client, name: str) -> None:
    request, theirs = recorded(name)
    content = request.get("body_text") or json.dumps(request.get("body"))
    async with client.session.request(request["method"], client.url + request["path"], data=content) as response:
        assert response.status == theirs["status"]
        assert await response.json() == theirs["body"]


@pytest.mark.parametrize("name", ["18-error-too-long", "18b-error-too-long-stream"])
async def test_a_prompt_that_is_too_long_is_refused_as_vllm_does(client: Client, name: str) -> None:
    request, theirs = recorded(name)
    status, body = await client.post(request["path"], request["body"])
    length = len(render_chat(request["body"]["messages"]))
    assert (status, body) == (400, json.loads(json.dumps(theirs["body"]).replace("1025", str(length))))


@pytest.mark.parametrize(
    "change",
    [
        {"messages": "hello"},
        {"messages": [{"role": "bard", "content": "x"}]},
        {"messages": [{"role": "user", "content": "x", "tool_calls": 5}]},
        {"tools": {}},
        {"tools": [5]},
        {"tool_choice": {"function": 5}},
        {"tool_choice": "any"},
        {"temperature": -1},
        {"temperature": "hot"},
        {"temperature": float("inf")},
        {"n": 0},
        {"max_tokens": "many"},
        {"top_logprobs": "all", "logprobs": True},
        {"stream_options": "usage"},
    ],
    ids=json.dumps,
)
async def test_a_malformed_field_is_refused_and_never_a_crash(client: Client, change: dict[str, Any]) -> None:
    status, body = await client.post("/v1/chat/completions", {**HELLO, **change})
    assert status == 400
    assert body["error"]["message"]


@pytest.mark.parametrize("content", ["[]", '"text"', "5", "null"])
async def test_a_body_that_is_no_object_is_refused(client: Client, content: str) -> None:
    status, body = await client.post("/v1/chat/completions", content)
    assert (status, body["error"]["type"]) == (400, "Bad Request")


async def test_a_token_prompt_outside_the_vocabulary_is_refused(client: Client) -> None:
    status, body = await client.post("/v1/completions", {"prompt": [1, 269]})
    assert (status, body["error"]["message"]) == (400, "Token id 269 is out of vocabulary")


async def test_the_side_endpoints_answer(client: Client) -> None:
    request, theirs = recorded("22c-tokenize-prompt")
    status, ours = await client.post("/tokenize", request["body"])
    assert status == 200
    assert_same_shape(ours, theirs["body"])
    assert ours["tokens"] == encode(request["body"]["prompt"])
    _, ours = await client.post("/tokenize", {"messages": HELLO["messages"], "tools": [TOOL]})
    assert ours["tokens"] == render_chat(HELLO["messages"], [TOOL])
    async with client.session.get(f"{client.url}/v1/models") as response:
        assert [model["id"] for model in (await response.json())["data"]] == ["tiny"]
    async with client.session.get(f"{client.url}/health") as response:
        assert (response.status, await response.read()) == (200, b"")
    async with client.session.get(f"{client.url}/version") as response:
        assert await response.json() == {"version": "0.32.0"}


async def test_a_chat_may_bring_the_ids_of_its_prompt(client: Client) -> None:
    body = {**HELLO, **CAPTURED}
    plain = await client.chat(body)
    ids = [*plain["prompt_token_ids"], *plain["choices"][0]["token_ids"]]
    for given in (plain["prompt_token_ids"], ids):
        told = await client.chat({**body, "kv_transfer_params": {"prompt_token_ids": given}})
        assert told["prompt_token_ids"] == given
        said = [entry["logprob"] for entry in told["choices"][0]["logprobs"]["content"]]
        assert said == Policy().log_probs_of([*given, *told["choices"][0]["token_ids"]])[len(given) :]
    assert (await client.chat({**body, "kv_transfer_params": {"prompt_token_ids": ids[:-1]}})) != plain
    for wrong in ([], [-1], [269], ["1"], "1"):
        status, _ = await client.post(
            "/v1/chat/completions", {**body, "kv_transfer_params": {"prompt_token_ids": wrong}}
        )
        assert status == 400
    async with serve_engine(PolicyEngine(model="tiny", takes_prompt_ids=False)) as older:
        ignored = await Client(older, client.session).chat({**body, "kv_transfer_params": {"prompt_token_ids": ids}})
    assert ignored["prompt_token_ids"] == plain["prompt_token_ids"]


async def test_the_tokenizer_endpoints_undo_each_other(client: Client) -> None:
    _, rendered = await client.post("/tokenize", {"messages": HELLO["messages"]})
    _, text = await client.post("/detokenize", {"tokens": rendered["tokens"]})
    assert text == {"prompt": "<|begin|><|user|>hello<|end|><|begin|><|assistant|>"}
    _, closed = await client.post("/tokenize", {"messages": HELLO["messages"], "add_generation_prompt": False})
    assert rendered["tokens"][: len(closed["tokens"])] == closed["tokens"]
    assert (await client.post("/detokenize", {"tokens": [269]}))[0] == 400


async def test_a_template_that_drops_reasoning_breaks_the_prefix_and_one_that_keeps_it_does_not(client: Client) -> None:
    async with serve_engine(PolicyEngine(habits=Habits(reasoning=True))) as url:
        thinker = Client(url, client.session)
        first = await thinker.chat({**HELLO, **CAPTURED, "max_tokens": 400})
        (choice,) = first["choices"]
        ids = [*first["prompt_token_ids"], *choice["token_ids"]]
        assert first["prompt_token_ids"][-1] == THINK
        assert END_OF_THOUGHT in choice["token_ids"]
        assert choice["message"]["reasoning"]
        history = [*HELLO["messages"], choice["message"], {"role": "user", "content": "go on"}]
        _, dropped = await thinker.post("/tokenize", {"messages": history})
        _, kept = await thinker.post(
            "/tokenize", {"messages": history, "chat_template_kwargs": {"preserve_thinking": True}}
        )
        assert dropped["tokens"][: len(ids)] != ids
        assert kept["tokens"][: len(ids)] == ids
        chunks = await thinker.events("/v1/chat/completions", {**HELLO, **CAPTURED, "max_tokens": 400})
        deltas = [part["delta"] for chunk in chunks for part in chunk["choices"]]
        assert "".join(delta.get("reasoning") or "" for delta in deltas) == choice["message"]["reasoning"]
        assert "".join(delta.get("content") or "" for delta in deltas) == choice["message"]["content"]


async def test_a_forced_call_comes_after_the_thought_that_the_prompt_began(client: Client) -> None:
    async with serve_engine(PolicyEngine(habits=Habits(reasoning=True))) as url:
        body = {**HELLO, **CAPTURED, "tools": [TOOL], "tool_choice": "required"}
        response = await Client(url, client.session).chat(body)
    assert response["choices"][0]["message"]["tool_calls"]
