"""Recorded traffic of real engines through their engine adapters, in every chunking."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from token_id_capture.server.engines import make_engine
from token_id_capture.server.engines.base import DeltaReader, Endpoint
from token_id_capture.server.engines.vllm import VllmEngine
from token_id_capture.server.settings import GatewaySettings
from token_id_capture.testing.replay import (
    Recording,
    Replayed,
    assert_replays,
    bytewise,
    in_chunks,
    load_recordings,
    replay,
)

FOLDERS = Path(__file__).parents[1] / "data" / "recordings"
ENGINES = {"vllm-0.32.0": "vllm", "llama-server-b1-0c1e570": "llama-cpp"}
OPTIONS = GatewaySettings(tokenize_prompts=True)


def generations(folder: str) -> dict[str, Recording]:
    """The recorded calls of captured endpoints; without one whose body is no JSON."""
    paths = make_engine(ENGINES[folder]).paths
    every = load_recordings(FOLDERS / folder)
    found = [recording for recording in every if recording.method == "POST" and recording.path in paths]
    return {recording.name: recording for recording in found if "malformed" not in recording.name}


CALLS = {folder: generations(folder) for folder in ENGINES}
EVERY_CALL = [(folder, name) for folder, calls in CALLS.items() for name in calls]
TOKENIZER = [
    recording
    for recording in load_recordings(FOLDERS / "llama-server-b1-0c1e570")
    if recording.path in ("/apply-template", "/tokenize")
]


def answers(recording: Recording) -> Mapping[str, Recording]:
    """What llama-server's tokenizer was recorded to say of this prompt."""
    asked = orjson.loads(recording.sent)
    for template, tokenize in zip(TOKENIZER[::2], TOKENIZER[1::2], strict=True):
        rendered = orjson.loads(template.sent)
        if all(rendered.get(name) == asked.get(name) for name in ("messages", "tools")):
            return {"/apply-template": template, "/tokenize": tokenize}
    return {}


def engine_of(folder: str) -> Any:
    return make_engine(ENGINES[folder])


async def once(folder: str, name: str) -> Replayed:
    recording = CALLS[folder][name]
    return await replay(recording, engine_of(folder), answers=answers(recording), settings=OPTIONS)


# Why calls of these names are not captured; all others are, or were refused by the engine.
NOT_CAPTURED = {
    "vllm-0.32.0": {
        "token_count_mismatch": ["03-chat-stream", "04e-completion-echo"],
        "no_token_ids": [
            "15-reasoning-not-included",
            "15b-reasoning-not-included-stream",
            "17-chat-nothing-asked",
            "17b-chat-nothing-asked-stream",
            "17c-chat-logprobs-only",
            "17d-chat-ids-only",
            "17e-chat-ids-only-stream",
        ],
        "lost_stream": ["24-chat-stream-aborted", "24b-chat-stream-aborted-mid-frame", "24c-chat-stream-aborted-first"],
    },
    "llama-server-b1-0c1e570": {
        "token_count_mismatch": [
            # Streams of chats lack the last token, stop strings theirs, and n=2 is counted once.
            "02-chat-stream-usage",
            "02b-chat-stream-return-tokens-verbose",
            "03-chat-stream",
            "06-chat-n2",
            "08-chat-stop-string",
            "09-chat-stop-string-stream",
        ],
        "no_token_ids": [
            "01b-chat-top-logprobs-0",
            "01d-chat-vllm-style-injection",
            "13b-tools-stream-without-logprobs",
            "17-chat-nothing-asked",
            "17b-chat-nothing-asked-stream",
            # Nobody recorded what the tokenizer makes of these prompts.
            "04-completion",
            "05-completion-stream",
            "12b-tools-text",
            "14-think",
            "14b-think-stream",
        ],
        "lost_stream": ["24-chat-stream-aborted"],
    },
}


@pytest.mark.parametrize("folder", list(ENGINES))
async def test_each_recorded_call_is_captured_refused_or_has_its_reason(folder: str) -> None:
    found: dict[str, list[str]] = {}
    outcomes: Counter[str] = Counter()
    for name, recording in CALLS[folder].items():
        done = await once(folder, name)
        assert done.response.status == recording.status
        outcome = "captured" if done.entries else "refused" if done.refused else "marked"
        outcomes[outcome] += 1
        if done.marks:
            found.setdefault(done.marks[0].partition(": ")[0], []).append(name)
        assert (outcome == "refused") == (recording.status >= 400), name
    expected = {reason: sorted(names) for reason, names in NOT_CAPTURED[folder].items()}
    assert {reason: sorted(names) for reason, names in found.items()} == expected
    assert outcomes["captured"] == {"vllm-0.32.0": 87, "llama-server-b1-0c1e570": 14}[folder]


@pytest.mark.parametrize(("folder", "name"), EVERY_CALL, ids=[f"{folder[:5]}-{name}" for folder, name in EVERY_CALL])
async def test_a_recorded_call_is_the_same_whole_byte_by_byte_and_in_chunks(folder: str, name: str) -> None:
    recording = CALLS[folder][name]
    if "verbose" in name:
        return  # the client asked for the ids in llama-server's own words
    await assert_replays(recording, lambda: engine_of(folder), answers=answers(recording), settings=OPTIONS)


@given(st.sampled_from(EVERY_CALL), st.integers(0, 10**6), st.integers(1, 3000))
@settings(max_examples=150)
def test_no_chunking_changes_the_entry_or_the_clients_bytes(call: tuple[str, str], seed: int, longest: int) -> None:
    async def compared() -> None:
        folder, name = call
        recording = CALLS[folder][name]
        asked: Any = {"answers": answers(recording), "settings": OPTIONS}
        usual, other = [
            await replay(recording, engine_of(folder), cut=cut, **asked)
            for cut in (lambda payload: [payload], in_chunks(seed, longest))
        ]
        assert other.content() == usual.content()
        assert (other.response, other.marks, other.refused) == (usual.response, usual.marks, usual.refused)

    asyncio.run(compared())


async def test_the_engine_is_asked_what_it_was_asked_when_it_was_recorded() -> None:
    added_since = {"include_reasoning", "return_weight_versions"}
    for folder, calls in CALLS.items():
        for name, recording in calls.items():
            done = await once(folder, name)
            sent, recorded = (orjson.loads(text) for text in (done.sent[0][1], recording.sent))
            if not done.entries or (sent.get("stream") is False and recorded["stream"]):
                continue  # chats of llama-server are asked for whole
            assert {key: sent.get(key) for key in sent.keys() - added_since} == recorded, name


async def test_the_ids_that_llama_server_names_are_stored_with_the_prompt_that_its_tokenizer_gives() -> None:
    done = await once("llama-server-b1-0c1e570", "12-tools-call")
    (entry,) = done.entries
    recording = CALLS["llama-server-b1-0c1e570"]["12-tools-call"]
    content = orjson.loads(recording.payload)["choices"][0]["logprobs"]["content"]
    assert entry.generation_token_ids == [item["id"] for item in content]
    assert entry.generation_log_probs == [item["logprob"] for item in content]
    assert entry.prompt_token_ids == orjson.loads(answers(recording)["/tokenize"].payload)["tokens"]
    assert [path for path, _ in done.sent] == ["/v1/chat/completions", "/apply-template", "/tokenize"]
    template, tokenize = (orjson.loads(question) for _, question in done.sent[1:])
    assert template["tools"] == orjson.loads(recording.sent)["tools"]
    assert "logprobs" not in template
    assert (tokenize["add_special"], tokenize["parse_special"]) == (True, True)


async def test_llama_servers_tokenizer_is_asked_only_if_that_is_allowed() -> None:
    recording = CALLS["llama-server-b1-0c1e570"]["01-chat"]
    done = await replay(recording, make_engine("llama-cpp"), answers=answers(recording))
    assert [path for path, _ in done.sent] == ["/v1/chat/completions"]
    assert done.marks == ("no_token_ids: choice 0 has no prompt token ids",)


async def test_a_prompt_of_another_length_than_the_engine_read_is_not_taken() -> None:
    calls = CALLS["llama-server-b1-0c1e570"]
    other = answers(calls["12-tools-call"])
    done = await replay(calls["01-chat"], make_engine("llama-cpp"), answers=other, settings=OPTIONS)
    assert done.entries == ()
    assert done.marks == ("token_count_mismatch: 127 prompt token ids from the tokenizer, 20 prompt tokens",)


@pytest.mark.parametrize("lacking", ["/apply-template", "/tokenize"])
async def test_a_tokenizer_that_does_not_answer_is_a_named_failure(lacking: str) -> None:
    recording = CALLS["llama-server-b1-0c1e570"]["01-chat"]
    told = {path: answer for path, answer in answers(recording).items() if path != lacking}
    refusing = Recording(lacking, "POST", lacking, b"", 501, "application/json", b"{}")
    for responses, problem in ((told, "nothing is recorded"), ({**told, lacking: refusing}, "answered HTTP 501")):
        done = await replay(recording, make_engine("llama-cpp"), answers=responses, settings=OPTIONS)
        ((mark,),) = [done.marks]
        assert mark.startswith("no_token_ids: no prompt token ids: ")
        assert problem in mark


async def test_weights_that_changed_during_a_call_are_stored_as_spans() -> None:
    (entry,) = (await once("vllm-0.32.0", "33-generate-weights-change")).entries
    assert entry.weight_version is None
    assert entry.model_extra is not None
    assert entry.model_extra["weight_versions"] == [
        {"version": "step-1", "start": 0, "end": 15},
        {"version": "step-2", "start": 15, "end": 300},
    ]
    (entry,) = (await once("vllm-0.32.0", "23-generate")).entries
    assert (entry.weight_version, entry.model_extra) == ("default", {})


async def test_a_generate_call_streams_the_entry_that_it_gives_whole() -> None:
    for folder, whole, streamed in (
        ("vllm-0.32.0", "23-generate", "23b-generate-stream"),
        ("llama-server-b1-0c1e570", "23-completion-native", "23b-completion-native-stream"),
    ):
        contents = [(await once(folder, name)).content() for name in (whole, streamed)]
        for content in contents:
            content[0].pop("response_id")
            content[0].pop("model")
        # vLLM answers a generate call with ids alone; what it counts is the same in both.
        assert contents[0] == contents[1], folder


@pytest.mark.parametrize("engine", ["vllm", "auto"])
async def test_what_litellm_makes_of_vllms_response_is_captured_as_far_as_it_passes_it_on(engine: str) -> None:
    (direct,) = (await once("vllm-0.32.0", "12c-tools-auto-text-and-call")).content()
    outcomes = {}
    for recording in load_recordings(FOLDERS / "litellm-1.110.2"):
        done = await assert_replays(recording, lambda: make_engine(engine))
        outcomes[recording.name] = done.marks or len(done.entries)
        for content in done.content():
            for name in ("prompt_token_ids", "generation_token_ids", "generation_log_probs"):
                assert content[name] == direct[name], recording.name
            assert content["output_items"][0]["content"] == direct["output_items"][0]["content"]
            assert "provider_specific_fields" not in content["output_items"][0]
    assert outcomes == {
        "openai-chat": 1,
        "openai-chat-stream": 1,
        "hosted_vllm-chat": 1,
        # That provider drops the prompt's ids from streams; tokcap check says so, and asks for whole responses.
        "hosted_vllm-chat-stream": ("no_token_ids: choice 0 has no prompt token ids",),
    }


class ShoutingEngine(VllmEngine):
    """An engine adapter from outside: a server that names the ids in its own way."""

    def reader(self, endpoint: Endpoint, body: Mapping[str, Any]) -> DeltaReader:
        """Reads ``TOKENS``."""
        reader = super().reader(endpoint, {})

        class Shouting(DeltaReader):
            def __init__(self) -> None:
                super().__init__(lambda part: {})

            def add(self, part: Any) -> Mapping[str, Any]:
                quiet = orjson.loads(orjson.dumps(part).replace(b"TOKENS", b"token_ids"))
                reader.add(quiet)
                return part  # type: ignore[no-any-return]

            def tokens(self) -> Any:
                return reader.tokens()

        return Shouting()


class RaisingReader(DeltaReader):
    """A reader with a mistake in it."""

    def __init__(self) -> None:
        super().__init__(lambda part: {})

    def add(self, part: Any) -> Mapping[str, Any]:
        """Fails."""
        raise RuntimeError("a mistake")


class RaisingAtTheEnd(RaisingReader):
    """One with a mistake where it sums up."""

    def add(self, part: Any) -> Mapping[str, Any]:
        """Reads nothing."""
        return part  # type: ignore[no-any-return]

    def tokens(self) -> Any:
        """Fails."""
        raise RuntimeError("a mistake")


class RaisingEngine(VllmEngine):
    """An engine adapter with a mistake in one of its members."""

    def __init__(self, member: str) -> None:
        setattr(self, member, self._fail)

    def _fail(self, *arguments: Any) -> Any:
        raise RuntimeError("a mistake")


class EngineWithReader(VllmEngine):
    """An engine adapter with another reader."""

    def __init__(self, reader: Callable[[], DeltaReader]) -> None:
        self.reader = lambda endpoint, body: reader()  # type: ignore[method-assign]


async def test_the_kit_tries_a_adapter_from_outside() -> None:
    recording = CALLS["vllm-0.32.0"]["02-chat-stream-usage"]
    loud = Recording(**{**recording.__dict__, "payload": recording.payload.replace(b'"token_ids"', b'"TOKENS"')})
    done = await replay(loud, make_engine(f"{__name__}:ShoutingEngine"))
    assert [len(entry.generation_token_ids) for entry in done.entries] == [15]
    # It hides what vLLM calls token_ids, and not its own word for it: the kit sees that.
    with pytest.raises(AssertionError, match="the client sees token ids"):
        await assert_replays(
            Recording(**{**CALLS["vllm-0.32.0"]["01-chat"].__dict__, "payload": _shouted("01-chat")}), ShoutingEngine
        )


def _shouted(name: str) -> bytes:
    return CALLS["vllm-0.32.0"][name].payload.replace(b'"token_ids"', b'"TOKENS"')


@pytest.mark.parametrize("name", ["01-chat", "02-chat-stream-usage"])
@pytest.mark.parametrize(
    "engine",
    [
        *(RaisingEngine(member) for member in ("can_stream", "request_fields", "hidden", "reader")),
        *map(EngineWithReader, (RaisingReader, RaisingAtTheEnd)),
    ],
    ids=["can_stream", "request_fields", "hidden", "reader", "reader.add", "reader.tokens"],
)
async def test_a_adapter_that_raises_costs_the_capture_and_not_the_call(name: str, engine: VllmEngine) -> None:
    if "can_stream" in vars(engine) and name == "01-chat":
        return  # of a call that is not streamed nobody asks
    recording = CALLS["vllm-0.32.0"][name]
    for cut in (lambda payload: [payload], bytewise):
        # What such an engine adapter would add is part of what the client asks for here.
        done = await replay(recording, engine, cut=cut, request=recording.sent)
        assert done.marks == ("capture_failed: RuntimeError: a mistake",)
        assert (done.entries, done.open, done.response.status, done.response.whole) == ((), True, 200, True)
        assert b"A river" in done.response.body or b'"content":"A"' in done.response.body
