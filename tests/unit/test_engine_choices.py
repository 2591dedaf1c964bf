"""Several choices of one call, and responses that contradict themselves; what stands beside the tokens of a choice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest

from support.spoken import Spoken, usage_chunk, vllm_completion
from support.ways import WAYS, parts, replayed
from token_id_capture.server.settings import GatewaySettings


def several(spoken: list[Spoken]) -> list[dict[str, Any]]:
    """What SGLang's /generate answers with n above 1."""
    return [WAYS["sglang-generate"].response(one) for one in spoken]


async def test_an_array_of_responses_is_a_call_with_sibling_choices() -> None:
    way = WAYS["sglang-generate"]
    both = [Spoken(), Spoken(ids=[20, 21, 22], log_probs=[-1.0, -2.0, -3.0])]
    recording = replace(way.recording(Spoken()), payload=orjson.dumps(several(both)))
    done = await replayed(way, recording=recording)
    first, second = sorted(done.entries, key=lambda entry: entry.model_call_id)
    assert second.model_call_id == f"{first.model_call_id}.1"
    assert (first.generation_token_ids, second.generation_token_ids) == ([10, 11, 12], [20, 21, 22])
    assert second.generation_log_probs == [-1.0, -2.0, -3.0]
    shown = orjson.loads(done.response.body)
    assert [list(response) for response in shown] == [["text", "output_ids", "meta_info"]] * 2
    assert not any("logprob" in name for response in shown for name in response["meta_info"])


@pytest.mark.parametrize("incremental", [False, True])
async def test_the_choices_of_a_generate_stream_are_told_apart_by_their_index(incremental: bool) -> None:
    way = WAYS["sglang-generate-incremental" if incremental else "sglang-generate-cumulative"]
    frames = []
    for index, spoken in enumerate((Spoken(), Spoken(ids=[20, 21, 22], texts=["b", "y", "e"]))):
        said: list[bytes] = way.response(spoken).split(b"\n\n")[:-2]
        frames.append([frame.replace(b'{"text"', b'{"index":%d,"text"' % index, 1) for frame in said])
    mixed = [frame for pair in zip(*frames, strict=True) for frame in pair]
    payload = b"\n\n".join([*mixed, b"data: [DONE]", b""])
    request = orjson.dumps({**way.request, "sampling_params": {"n": 2}})
    done = await replayed(way, recording=replace(way.recording(Spoken()), payload=payload), request=request)
    entries = sorted(done.entries, key=lambda entry: entry.model_call_id)
    assert [entry.generation_token_ids for entry in entries] == [[10, 11, 12], [20, 21, 22]]
    assert [entry.output_items[0]["content"] for entry in entries] == ["Hello", "bye"]


async def test_a_generate_stream_that_contradicts_itself_is_refused() -> None:
    way = WAYS["sglang-generate-incremental"]
    frames = way.response(Spoken()).split(b"\n\n")
    # The second chunk is missing, so the third goes on from nowhere.
    payload = b"\n\n".join([frames[0], *frames[2:]])
    done = await replayed(way, recording=replace(way.recording(Spoken()), payload=payload))
    assert done.marks == ("invalid_tokens: choice 0: a chunk with 1 tokens after 1 makes 3",)
    # An aborted call sends its last token once more, which is no further token.
    again = b"\n\n".join([*frames[:3], frames[2], *frames[3:]])
    done = await replayed(way, recording=replace(way.recording(Spoken()), payload=again))
    assert done.entries[0].generation_token_ids == [10, 11, 12]


@pytest.mark.parametrize("name", ["vllm-chat", "vllm-completion", "sglang-chat", "message-chat"])
async def test_two_choices_with_one_index_are_refused(name: str) -> None:
    way = WAYS[name]
    response = way.response(Spoken())
    response["choices"] *= 2
    response["usage"]["completion_tokens"] *= 2
    done = await replayed(way, recording=replace(way.recording(Spoken()), payload=orjson.dumps(response)))
    assert done.marks == ("invalid_tokens: two choices have the same index",)


async def test_ids_that_sglang_names_twice_and_differently_are_refused() -> None:
    way = WAYS["sglang-chat"]
    response = {**way.response(Spoken()), "sglext": {"input_ids": [1, 2, 3], "output_ids": [[10, 11, 13]]}}
    done = await replayed(way, recording=replace(way.recording(Spoken()), payload=orjson.dumps(response)))
    assert done.marks == ("invalid_tokens: choice 0: the choice and sglext name different token ids",)


VERSIONED = [name for name in WAYS if name.startswith("sglang-") and "completion" not in name and "stream" not in name]


@pytest.mark.parametrize("name", [*VERSIONED, "sglang-chat-not-streamed", "sglang-generate-cumulative"])
async def test_the_version_of_the_weights_is_stored_wherever_sglang_puts_it(name: str) -> None:
    (entry,) = (await replayed(WAYS[name])).entries
    assert entry.weight_version == "step-7"


@pytest.mark.parametrize(
    ("spans", "version", "stored"),
    [
        ([{"version": "w1", "start": 0, "end": 3}], "w1", None),
        (
            [{"version": "w1", "start": 0, "end": 2}, {"version": "w2", "start": 2, "end": 3}],
            None,
            [{"version": "w1", "start": 0, "end": 2}, {"version": "w2", "start": 2, "end": 3}],
        ),
        (None, None, None),
    ],
)
async def test_the_weight_versions_of_a_chat_are_stored_and_shown_only_to_who_asked(
    spans: Any, version: str | None, stored: Any
) -> None:
    way = WAYS["vllm-chat"]
    response = way.response(Spoken())
    response["choices"][0]["weight_versions"] = spans
    recording = replace(way.recording(Spoken()), payload=orjson.dumps(response))
    for asked in (False, True):
        request = {**way.request, **({"return_weight_versions": True} if asked else {})}
        done = await replayed(way, recording=recording, request=orjson.dumps(request))
        (entry,) = done.entries
        assert (entry.weight_version, (entry.model_extra or {}).get("weight_versions")) == (version, stored)
        assert orjson.loads(done.response.body)["choices"][0]["weight_versions"] == (spans if asked else None)


@pytest.mark.parametrize("name", ["vllm-completion", "sglang-completion"])
async def test_each_prompt_of_a_batch_is_a_choice_with_a_prompt_of_its_own(name: str) -> None:
    way = WAYS[name]
    batch = [Spoken(), Spoken(prompt=[7, 8], ids=[20, 21, 22])]
    whole = vllm_completion(batch[0])
    choices = [{**vllm_completion(one)["choices"][0], "index": index} for index, one in enumerate(batch)]
    whole |= {"choices": choices, "usage": {"completion_tokens": 6}}
    chunks = [{**whole, "choices": [choice], "usage": None} for choice in reversed(choices)]
    total = {**usage_chunk(Spoken()), "usage": {"completion_tokens": 6}}
    streamed = b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in (*chunks, total)) + b"data: [DONE]\n\n"
    for payload, kind in ((orjson.dumps(whole), "application/json"), (streamed, "text/event-stream")):
        request = {**way.request, "prompt": ["a", "b"], **({"stream": True} if "event" in kind else {})}
        recording = replace(way.recording(Spoken()), payload=payload, content_type=kind)
        done = await replayed(way, recording=recording, request=orjson.dumps(request))
        found = sorted(done.entries, key=lambda entry: entry.model_call_id)
        assert [(entry.prompt_token_ids, entry.generation_token_ids) for entry in found] == [
            (one.prompt, one.ids) for one in batch
        ]
        assert len(parts(done.response.body)) == (1 if "json" in kind else 2)


@pytest.mark.parametrize(
    ("options", "detail"),
    [
        (GatewaySettings(), "choice 0 has no prompt token ids"),
        (GatewaySettings(tokenize_prompts=True), "no prompt token ids: the prompt is a list, not one text"),
    ],
)
async def test_llama_servers_batches_have_no_prompt_ids(options: GatewaySettings, detail: str) -> None:
    way = WAYS["llama-completion-text"]
    response = way.response(Spoken())
    response["choices"] = [{**response["choices"][0], "index": index} for index in (0, 1)]
    response["usage"]["completion_tokens"] = 6
    request = orjson.dumps({**way.request, "prompt": ["a", "b"]})
    recording = replace(way.recording(Spoken()), payload=orjson.dumps(response))
    done = await replayed(way, recording=recording, request=request, settings=options)
    assert done.marks == (f"no_token_ids: {detail}",)


@pytest.mark.parametrize("name", ["vllm-completion-stream", "sglang-completion", "sglang-completion-stream"])
async def test_an_echoed_prompt_is_no_generation(name: str) -> None:
    # The log probabilities are those of prompt and answer; the engine counts the answer alone.
    way = WAYS[name]
    echoed = Spoken(ids=[1, 2, 3, 10, 11, 12], log_probs=[-1.0] * 6, texts=["a"] * 6, count=3)
    done = await replayed(way, echoed, request=orjson.dumps({**way.request, "echo": True}))
    assert done.marks == ("token_count_mismatch: 6 token ids, 6 log probabilities, 3 completion tokens",)


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("vllm-chat", {"temperature": 0.7, "use_beam_search": True, "bad_words": ["x"]}),
        ("llama-native", {"n_predict": 8, "mirostat": 2, "samplers": ["top_k"]}),
        ("sglang-generate", {"sampling_params": {"max_new_tokens": 8, "temperature": 0.5}}),
    ],
)
async def test_how_was_sampled_is_stored_in_the_engines_own_words(name: str, asked: dict[str, Any]) -> None:
    way = WAYS[name]
    done = await replayed(way, request=orjson.dumps({**way.request, **asked, "seed": None, "user": "somebody"}))
    assert done.entries[0].sampling == asked
