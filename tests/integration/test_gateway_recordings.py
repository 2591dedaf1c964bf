"""Recorded engine traffic through the gateway: what is stored, what is sent, and what the client sees."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest

from support.replay import ADDED_TO_CHATS, RECORDINGS, Gateway, Recording, running_gateway

# Recordings of requests that the gateway would not send: without log probabilities, ids or usage.
NEVER_SENT = ("03", "04b", "04e", "15", "15b", "17", "17b", "17c", "17d", "17e", "24", "24b", "24c")
PAIRS = {
    "01-chat": "02-chat-stream-usage",
    "04-completion": "05-completion-stream",
    "06-chat-n2": "07-chat-n2-stream",
    "08-chat-stop-string": "09-chat-stop-string-stream",
    "10-chat-immediate-eos": "10b-chat-immediate-eos-stream",
    "11-chat-length": "11b-chat-length-stream",
    "12-tools-auto-text": "13-tools-auto-text-stream",
    "12b-tools-auto-call": "13b-tools-auto-call-stream",
    "12c-tools-auto-text-and-call": "13c-tools-auto-text-and-call-stream",
    "12d-tools-named": "13d-tools-named-stream",
    "12e-tools-required": "13e-tools-required-stream",
    "14-reasoning": "14b-reasoning-stream",
    "14c-reasoning-cut-by-length": "14d-reasoning-cut-by-length-stream",
    "14e-no-think-tags": "14f-no-think-tags-stream",
    "14h-reasoning-and-tool": "14i-reasoning-and-tool-stream",
    "16-chat-tokens-as-ids": "16b-chat-tokens-as-ids-stream",
    "30-processed-logprobs-top-k-2": "30b-processed-logprobs-top-k-2-stream",
}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path) as running:
        yield running


def generations() -> list[Recording]:
    """The recordings of captured calls, as the gateway makes them."""
    found = []
    for path in sorted(RECORDINGS.rglob("*.request.json")):
        name = str(path.relative_to(RECORDINGS)).removesuffix(".request.json")
        recording = Recording.named(name)
        number = name.rpartition("/")[2].partition("-")[0]
        captured = recording.path in ("/v1/chat/completions", "/v1/completions") and recording.status == 200
        if captured and number not in NEVER_SENT:
            found.append(recording)
    return found


def parts(payload: bytes) -> list[dict[str, Any]]:
    """The response, or the chunks of a stream."""
    if payload.startswith(b"{"):
        return [orjson.loads(payload)]
    datas = [frame.removeprefix(b"data: ") for frame in payload.split(b"\n\n") if frame]
    return [orjson.loads(data) for data in datas if data != b"[DONE]"]


def recorded_tokens(recording: Recording) -> dict[int, list[Any]]:
    """Prompt ids, ids and log probabilities of each choice, read in the plainest way."""
    found: dict[int, list[Any]] = {}
    for part in parts(recording.payload):
        for choice in part["choices"]:
            tokens = found.setdefault(choice["index"], [None, [], []])
            tokens[0] = tokens[0] or part.get("prompt_token_ids") or choice.get("prompt_token_ids")
            tokens[1] += choice.get("token_ids") or []
            log_probs = choice.get("logprobs") or {}
            tokens[2] += log_probs.get("token_logprobs") or [each["logprob"] for each in log_probs.get("content") or ()]
    return found


def without_additions(recording: Recording) -> bytes:
    """The recorded response as an engine would have sent it to a client that asked for none of the additions."""

    def nulled(part: dict[str, Any]) -> dict[str, Any]:
        for holder in (part, *part["choices"]):
            for name in ("token_ids", "prompt_token_ids"):
                if holder.get(name) is not None:
                    holder[name] = None
        for choice in part["choices"]:
            choice["logprobs"] = None
        return part

    if recording.payload.startswith(b"{"):
        return orjson.dumps(nulled(orjson.loads(recording.payload)))
    frames = [orjson.dumps(nulled(part)) for part in parts(recording.payload)]
    return b"".join(b"data: " + frame + b"\n\n" for frame in (*frames, b"[DONE]"))


async def test_every_recorded_generation_is_stored_as_the_engine_counted_it(gateway: Gateway) -> None:
    for number, recording in enumerate(generations()):
        rollout = f"r{number}"
        response = await gateway.replay(recording.name, rollout=rollout)
        assert (response.status, response.whole) == (200, True), (recording.name, response.body)
        entries = await gateway.store.read_entries(rollout)
        stored = [
            [entry.prompt_token_ids, entry.generation_token_ids, entry.generation_log_probs]
            for entry in sorted(entries, key=lambda entry: entry.model_call_id)
        ]
        assert stored == list(recorded_tokens(recording).values()), recording.name
        snapshot = await gateway.store.freeze(rollout)
        assert not snapshot.incomplete, recording.name
        assert await gateway.flags(rollout) == [], recording.name


async def test_a_streamed_call_gives_the_entry_that_the_same_call_gives_unstreamed(gateway: Gateway) -> None:
    def comparable(entries: tuple[Any, ...]) -> list[dict[str, Any]]:
        dumped = [
            entry.model_dump(exclude={"rollout_id", "model_call_id", "created_at", "response_id"})
            for entry in sorted(entries, key=lambda entry: entry.model_call_id)
        ]
        for entry in dumped:
            for item in entry["output_items"]:
                for call in item.get("tool_calls", ()):
                    call["id"] = "random"
                    # Greedy and seeded calls repeat the tokens; the recorded tool calls name other cities.
                    assert orjson.loads(call["function"]["arguments"])["city"]
        return dumped

    for whole, streamed in PAIRS.items():
        await gateway.replay(whole, rollout=f"w{whole[:3]}")
        await gateway.replay(streamed, rollout=f"s{whole[:3]}")
        entries = await gateway.store.read_entries(f"w{whole[:3]}")
        assert entries, whole
        assert comparable(entries) == comparable(await gateway.store.read_entries(f"s{whole[:3]}")), whole


async def test_a_client_that_asked_for_nothing_sees_what_an_engine_sends_then(gateway: Gateway) -> None:
    for recording in generations():
        asked = {"return_tokens_as_token_ids", "prompt_logprobs"} & recording.client_request().keys()
        if asked or recording.client_request().get("logprobs"):
            continue
        response = await gateway.replay(recording.name)
        assert response.body == without_additions(recording), recording.name


async def test_a_plain_response_through_the_gateway_has_the_shape_of_the_engines(
    gateway: Gateway,
) -> None:
    plain, streamed = Recording.named("17-chat-nothing-asked"), Recording.named("17b-chat-nothing-asked-stream")
    (whole,) = parts((await gateway.replay("01-chat")).body)
    (direct,) = parts(plain.payload)
    assert shape(whole) == shape(direct)
    through = [shape(part) for part in parts((await gateway.replay("02-chat-stream-usage")).body)]
    chunks = [shape(part) for part in parts(streamed.payload)]
    # A chunk without text ends the one stream and not the other; both are the engine's own.
    assert through[:2] == chunks[:2]
    assert through[-1] == chunks[-1]


def shape(value: Any) -> Any:
    """The keys in their order, and the types of the values."""
    if isinstance(value, dict):
        return [(key, shape(member)) for key, member in value.items()]
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    return type(value).__name__


async def test_fields_that_the_client_asked_for_stay(gateway: Gateway) -> None:
    recording = Recording.named("01-chat")
    plain = recording.client_request()
    for asked, seen, hidden in (
        ({"logprobs": True}, ["logprobs"], ["token_ids", "prompt_token_ids"]),
        ({"return_token_ids": True}, ["token_ids", "prompt_token_ids"], ["logprobs"]),
        ({"logprobs": True, "return_token_ids": True}, ["logprobs", "token_ids", "prompt_token_ids"], []),
    ):
        response = (await gateway.replay("01-chat", {**plain, **asked})).json()
        merged = {**response, **response["choices"][0]}
        assert [name for name in seen if merged[name] is None] == []
        assert [name for name in hidden if merged[name] is not None] == []
    everything = await gateway.replay("01-chat", {**plain, "logprobs": True, "return_token_ids": True})
    assert everything.body == recording.payload


async def test_more_alternatives_that_the_client_asked_for_stay_asked_for(gateway: Gateway) -> None:
    recording = Recording.named("26-chat-top-logprobs-3")
    body = {**recording.client_request(), "logprobs": True}
    assert body["top_logprobs"] == 3
    response = await gateway.replay(recording.name, body)
    assert response.status == 200, response.body
    assert len(response.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 3


async def test_a_null_for_top_logprobs_is_sent_as_zero(gateway: Gateway) -> None:
    plain = Recording.named("01-chat").client_request()
    response = await gateway.replay("01-chat", {**plain, "logprobs": True, "top_logprobs": None})
    assert response.status == 200, response.body
    sent = gateway.engine.received[-1].json()
    assert (sent["logprobs"], sent["top_logprobs"]) == (True, 0)
    assert len(await gateway.store.read_entries("r1")) == 1


async def test_the_client_that_did_not_ask_for_the_usage_does_not_get_its_chunk(gateway: Gateway) -> None:
    recording = Recording.named("02-chat-stream-usage")
    plain = recording.client_request()
    del plain["stream_options"]
    response = await gateway.replay(recording.name, plain)
    assert response.body == b"".join(
        frame + b"\n\n" for frame in without_additions(recording).split(b"\n\n") if frame and b'"usage"' not in frame
    )
    assert (await gateway.entry()).finish_reason == "stop"


async def test_everything_else_in_the_request_reaches_the_engine_byte_for_byte(gateway: Gateway) -> None:
    async def answer(request: Any) -> Any:
        return await plain_answer(request)

    gateway.engine.handler = answer
    message = '{"role":"user","content":"\\u00e9 \\ud83d\\ude00 \\n"}'
    odd = f'{{ "seed" : 1e2,"messages":[{message}] , "x": 18446744073709551616 }}'
    response = await gateway.post("/v1/chat/completions", odd.encode())
    assert response.status == 200
    added = b"," + orjson.dumps(ADDED_TO_CHATS)[1:]
    assert gateway.engine.received[-1].body == odd.encode()[:-1] + added


async def plain_answer(request: Any) -> Any:
    from aiohttp import web

    return web.Response(body=Recording.named("01-chat").payload, content_type="application/json")


async def test_reasoning_that_the_client_refused_is_captured_and_not_shown(gateway: Gateway) -> None:
    for name in ("14-reasoning", "14b-reasoning-stream"):
        plain = {**Recording.named(name).client_request(), "include_reasoning": False}
        response = await gateway.replay(name, plain, rollout=name[:3])
        assert gateway.engine.received[-1].json()["include_reasoning"] is True
        assert b"I add" not in response.body
        assert b"That makes" not in response.body
        entry = await gateway.entry(name[:3])
        assert entry.output_items[0]["reasoning"] == "\nI add 3 and 4. That makes 8.\n"
        assert len(entry.generation_token_ids) == 27
        shown = parts(response.body)
        texts = [
            choice.get("delta", choice.get("message")).get("content") or ""
            for part in shown
            for choice in part["choices"]
        ]
        assert "".join(texts) == "\n\n3 plus 4 is 8."


async def test_a_refused_reasoning_stream_shows_the_chunks_that_the_engine_itself_would_show(gateway: Gateway) -> None:
    plain = {**Recording.named("14b-reasoning-stream").client_request(), "include_reasoning": False}
    response = await gateway.replay("14b-reasoning-stream", plain)

    def said(payload: bytes) -> list[Any]:
        deltas = [choice["delta"] for part in parts(payload) for choice in part["choices"]]
        return [
            {key: value for key, value in delta.items() if value is not None}
            for delta in deltas
            if any(value is not None for value in delta.values())
        ]

    assert said(response.body) == said(Recording.named("15b-reasoning-not-included-stream").payload)


async def test_an_aborted_generation_is_stored_with_what_it_had(gateway: Gateway) -> None:
    for name in ("32-pause-abort", "32b-pause-abort-stream", "32d-pause-abort-completion"):
        await gateway.replay(name, rollout=name[:3])
        entry = await gateway.entry(name[:3])
        assert entry.finish_reason == "abort"
        assert len(entry.generation_token_ids) > 0


async def test_the_choices_of_a_call_are_siblings_under_one_prompt(gateway: Gateway) -> None:
    await gateway.replay("04d-completion-two-prompts-n2")
    entries = sorted(await gateway.store.read_entries("r1"), key=lambda entry: entry.model_call_id)
    first = entries[0].model_call_id
    assert [entry.model_call_id for entry in entries] == [first, f"{first}.1", f"{first}.2", f"{first}.3"]
    prompts = [entry.prompt_token_ids.tolist() for entry in entries]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]


async def test_an_echoed_prompt_is_flagged_and_never_captured_with_the_prompts_log_probabilities(
    gateway: Gateway,
) -> None:
    response = await gateway.replay("04e-completion-echo")
    assert response.status == 200
    assert await gateway.store.read_entries("r1") == ()
    assert await gateway.flags() == [("token_count_mismatch", "4 token ids, 7 log probabilities, 4 completion tokens")]


async def test_what_was_asked_and_answered_is_kept_with_the_entry(gateway: Gateway) -> None:
    recording = Recording.named("01-chat")
    await gateway.request(
        "POST",
        gateway.base() + recording.path,
        orjson.dumps(recording.client_request()),
        {"x-recording": "01-chat", "X-Claude-Code-Agent-Id": "agent-7", "content-type": "application/json"},
    )
    entry = await gateway.entry()
    assert entry.model == "tiny"
    assert entry.response_id == orjson.loads(recording.payload)["id"]
    assert entry.finish_reason == "stop"
    assert entry.sampling == {"max_tokens": 64, "temperature": 1, "seed": 3}
    assert entry.output_items == [
        {
            "type": "message",
            "role": "assistant",
            "content": "A river is a large stream of water that runs to the sea.",
        }
    ]
    assert entry.token_item_index == 0
    assert entry.model_extra == {"session_headers": {"x-claude-code-agent-id": "agent-7"}}


async def test_a_recorded_conversation_becomes_one_snapshot_of_growing_prompts(gateway: Gateway) -> None:
    for folder in ("chain-clean", "chain-clean-stream"):
        for path in sorted((RECORDINGS / folder).glob("*.request.json")):
            await gateway.replay(f"{folder}/{path.name.removesuffix('.request.json')}", rollout=folder)
        snapshot = await gateway.store.freeze(folder)
        assert not snapshot.incomplete
        lengths = [(len(entry.prompt_token_ids), len(entry.generation_token_ids)) for entry in snapshot.entries]
        assert lengths == [(128, 22), (176, 13), (210, 15), (248, 22), (296, 13)]
        details = await gateway.store.describe_rollout(folder)
        assert [call.prefix_call_id is None for call in details.calls] == [True, False, False, False, False]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_official_client_works_through_the_gateway(gateway: Gateway, stream: bool) -> None:
    chat = Recording.named("02-chat-stream-usage" if stream else "01-chat")
    completion = Recording.named("05-completion-stream" if stream else "04-completion")

    def asked(recording: Recording) -> dict[str, Any]:
        return {**recording.client_request(), "extra_headers": {"x-recording": recording.name}}

    def sync_calls() -> tuple[str, str]:
        with openai.OpenAI(base_url=gateway.base("sync") + "/v1", api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(**asked(chat))
            text = client.completions.create(**asked(completion))
            if not stream:
                return answer.choices[0].message.content, text.choices[0].text
            return (
                "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices),
                "".join(chunk.choices[0].text for chunk in text if chunk.choices),
            )

    expected = ("A river is a large stream of water that runs to the sea.", " a river?")
    assert await asyncio.to_thread(sync_calls) == expected
    async with openai.AsyncOpenAI(base_url=gateway.base("async") + "/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(**asked(chat))
        if stream:
            assert "".join([c.choices[0].delta.content or "" async for c in answer if c.choices]) == expected[0]
        else:
            assert answer.choices[0].message.content == expected[0]
    assert len(await gateway.store.read_entries("sync")) == 2
    assert len(await gateway.store.read_entries("async")) == 1
