"""What holds for every engine: where the tokens are, what is never stored, and what the client sees."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.spoken import Spoken, vllm_spelled
from support.ways import SEEN_BY_AUTO, STREAM, WAYS, Way, parts, replayed
from token_id_capture.server.check.in_memory import MemorySink, call_in_memory
from token_id_capture.server.engines import make_engine
from token_id_capture.server.engines.base import Endpoint
from token_id_capture.server.gateway import Gateway
from token_id_capture.server.middleware import TokenCaptureMiddleware
from token_id_capture.server.settings import GatewaySettings
from token_id_capture.server.wire.request import CallBody
from token_id_capture.testing.replay import (
    RecordedEngine,
    Recording,
    assert_replays,
    bytewise,
    in_chunks,
)

every_way = pytest.mark.parametrize("way", list(WAYS.values()), ids=list(WAYS))
STREAMED = {name: way for name, way in WAYS.items() if isinstance(way.response(Spoken()), bytes)}
every_stream = pytest.mark.parametrize("way", list(STREAMED.values()), ids=list(STREAMED))
# Where ids come twice: as such, and with the log probabilities.
WITNESSED = ["vllm-spelled-beside", "vllm-generate", "sglang-chat", "sglang-generate", "llama-native"]


@every_way
async def test_the_same_generation_gives_the_same_entry_wherever_the_engine_puts_its_ids(way: Way) -> None:
    done = await replayed(way)
    (entry,) = done.entries
    spoken = Spoken()
    assert (entry.prompt_token_ids, entry.generation_token_ids) == (spoken.prompt, spoken.ids)
    assert entry.generation_log_probs == spoken.log_probs
    assert entry.finish_reason == "stop"
    assert (done.marks, done.refused, done.open) == ((), (), False)
    if "generate" not in way.path or way.engine == "sglang":
        assert entry.output_items == [{"type": "message", "role": "assistant", "content": "Hello"}]


@pytest.mark.parametrize("name", SEEN_BY_AUTO)
async def test_without_a_name_the_response_tells_the_engine(name: str) -> None:
    done = await replayed(WAYS[name], engine="auto")
    (entry,) = done.entries
    assert entry.generation_token_ids == Spoken().ids
    assert entry.generation_log_probs == Spoken().log_probs


@every_way
async def test_the_client_sees_the_response_and_not_what_was_added_to_it(way: Way) -> None:
    done = await assert_replays(
        replace(way.recording(Spoken()), sent=orjson.dumps(way.request)),
        lambda: make_engine(way.engine),
        answers=way.answers,
        settings=way.options,
    )
    assert done.response.whole
    assert bool(orjson.loads(done.sent[0][1]).get("stream")) == isinstance(way.response(Spoken()), bytes)
    shown = parts(done.response.body)
    for hidden in (b"response_token_ids", b"meta_info", b"input_ids", b"sglext_ids", b"generation_", b"token_id:"):
        if way.path != "/generate":
            assert hidden not in done.response.body
    if way.path in ("/v1/chat/completions", "/v1/completions"):
        choices = [choice for part in shown for choice in part["choices"]]
        content = "".join(
            (choice.get("delta") or choice.get("message") or {"content": choice.get("text")}).get("content") or ""
            for choice in choices
        )
        assert content == "Hello"
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
        assert not any(choice.get("logprobs") for choice in choices)


@every_way
async def test_a_gap_in_the_ids_is_a_count_mismatch_and_changes_nothing_for_the_client(way: Way) -> None:
    whole, gap = await replayed(way), await replayed(way, Spoken(count=12))
    assert gap.entries == ()
    assert gap.marks == ("token_count_mismatch: 3 token ids, 3 log probabilities, 12 completion tokens",)
    assert gap.open
    assert len(parts(gap.response.body)) == len(parts(whole.response.body))


@pytest.mark.parametrize("name", WITNESSED)
async def test_ids_that_are_shifted_against_their_log_probabilities_are_refused(name: str) -> None:
    done = await replayed(WAYS[name], Spoken(named=[11, 12, 13]))
    assert done.entries == ()
    assert done.marks == ("invalid_tokens: choice 0: token id 0 is 10, but its log probability is for 11",)


@every_way
@pytest.mark.parametrize(
    "spoken",
    [
        Spoken(ids=[10, None, 12]),
        Spoken(ids=[10, True, 12]),
        Spoken(ids=[10, 11.5, 12]),
        Spoken(ids=[10, "11", 12]),
        Spoken(ids=[10, 2**40, 12]),
        Spoken(ids=[10, -1, 12]),
        Spoken(log_probs=[-0.5, None, -0.125]),
        Spoken(log_probs=[-0.5, False, -0.125]),
        Spoken(log_probs=[-0.5, "-0.25", -0.125]),
        Spoken(log_probs=[-0.5, [], -0.125]),
    ],
    ids=lambda spoken: f"{spoken.ids}-{spoken.log_probs}",
)
async def test_one_wrong_item_refuses_the_call_and_never_shortens_an_array(way: Way, spoken: Spoken) -> None:
    if "11" in spoken.ids and way.response is vllm_spelled:
        return  # there an id is text anyhow
    done = await replayed(way, spoken)
    assert done.entries == ()
    ((mark,),) = [done.marks]
    assert mark.startswith(("invalid_tokens: ", "no_token_ids: "))
    assert done.open


@every_way
async def test_a_placeholder_is_no_log_probability(way: Way) -> None:
    done = await replayed(way, Spoken(log_probs=[-0.5, -9999.0, -0.125]))
    assert done.marks == ("log_prob_placeholder: log probability 1 is -9999.0",)
    assert done.entries == ()


@every_way
async def test_an_aborted_generation_is_stored_and_says_so(way: Way) -> None:
    (entry,) = (await replayed(way, Spoken(finish="abort"))).entries
    assert entry.finish_reason == "abort"


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if way.path == "/v1/chat/completions"])
async def test_a_null_for_top_logprobs_reaches_no_engine(name: str) -> None:
    way = WAYS[name]
    done = await replayed(way, request=orjson.dumps({**way.request, "logprobs": True, "top_logprobs": None}))
    if way.engine != "message":
        sent = orjson.loads(done.sent[0][1])
        assert (sent["logprobs"], sent["top_logprobs"]) == (True, 1 if way.engine == "llama-cpp" else 0)
    assert len(done.entries) == 1


@every_way
async def test_an_engine_that_sends_no_log_probabilities_is_a_named_failure(way: Way) -> None:
    payload = way.recording(Spoken()).payload
    for name in (b"logprobs", b"output_token_logprobs", b"completion_probabilities", b"generation_log_probs"):
        payload = payload.replace(b'"%s":' % name, b'"no_%s":' % name)
    done = await replayed(way, recording=replace(way.recording(Spoken()), payload=payload))
    assert done.entries == ()
    ((mark,),) = [done.marks]
    assert mark.startswith("no_token_ids: choice 0 has no")
    assert mark.endswith("no log probabilities")


@every_stream
@pytest.mark.parametrize(("end", "space"), [(b"\r\n", b""), (b"\r", b" "), (b"\n", b"")], ids=["crlf", "cr", "lf"])
async def test_line_ends_spaces_and_split_characters_change_nothing(way: Way, end: bytes, space: bytes) -> None:
    spoken = Spoken(texts=["字", "é🙂", ""])
    plain = way.recording(spoken)
    spelled = replace(plain, payload=plain.payload.replace(b"data: ", b"data:" + space).replace(b"\n", end))
    usual = await replayed(way, recording=plain)
    for cut in (bytewise, in_chunks(5, longest=7)):
        other = await replayed(way, recording=spelled, cut=cut)
        assert other.content() == usual.content()
        assert other.response.body == usual.response.body.replace(b"data: ", b"data:" + space).replace(b"\n", end)


@every_stream
async def test_a_stream_that_breaks_off_or_ends_early_is_lost(way: Way) -> None:
    recording = way.recording(Spoken())
    frames = recording.payload.split(b"\n\n")
    # What ends a stream: all choices finished and counted, or [DONE].
    early = replace(recording, payload=b"\n\n".join(frames[:2]) + b"\n\n")
    for breaks in (True, False):
        done = await replayed(way, recording=early, breaks=breaks)
        ((mark,),) = [done.marks]
        assert mark.startswith("lost_stream: ")
        assert (done.entries, done.open, done.response.whole) == ((), True, False)


@every_stream
async def test_what_comes_after_the_end_is_no_part_of_the_response_in_any_chunking(way: Way) -> None:
    recording = way.recording(Spoken())
    if b"[DONE]" not in recording.payload:
        return
    head, _, _ = recording.payload.rpartition(b"data: [DONE]")
    first = head.split(b"\n\n")[1] + b"\n\n"
    late = replace(recording, payload=recording.payload + first + b": bye")
    early = replace(recording, payload=b"data: [DONE]\n\n" + head)
    for cut in (lambda payload: [payload], bytewise, in_chunks(3, longest=40)):
        usual, done = await replayed(way), await replayed(way, recording=late, cut=cut)
        assert done.content() == usual.content()
        assert done.response.body.startswith(usual.response.body)
        assert done.response.body.endswith(b": bye")
        assert b'"token_ids":[' not in done.response.body or way.path == "/inference/v1/generate"
        done = await replayed(way, recording=early, cut=cut)
        assert done.marks == ("no_token_ids: the response has no choices",)


@every_way
async def test_a_call_that_the_engine_refuses_is_no_hole(way: Way) -> None:
    error = orjson.dumps({"error": {"message": "the context is too long", "code": 400}})
    recording = Recording("refused", "POST", way.path, b"", 400, "application/json", error)
    done = await replayed(way, recording=recording)
    assert (done.response.status, done.response.body) == (400, error)
    assert (done.entries, done.marks, done.open) == ((), (), False)
    assert done.refused == ("HTTP 400: the context is too long",)


@every_way
@pytest.mark.parametrize("breaks", [False, True])
async def test_an_engine_that_fails_leaves_an_open_intent_and_a_reason(way: Way, breaks: bool) -> None:
    error = b'{"error":{"message":"CUDA error"}}'
    recording = Recording("failed", "POST", way.path, b"", 200 if breaks else 500, "application/json", error)
    done = await replayed(way, recording=recording, breaks=breaks)
    assert (done.response.status, done.open, done.entries) == (502 if breaks else 500, True, ())
    ((mark,),) = [done.marks]
    assert mark.startswith("unknown_outcome: ")


@every_way
async def test_whatever_the_client_asked_for_it_gets(way: Way) -> None:
    everything = {
        "logprobs": True if way.path.endswith("chat/completions") else 1,
        "return_token_ids": True,
        "return_prompt_token_ids": True,
        "return_meta_info": True,
        "return_logprob": True,
        "n_probs": 1,
        "return_tokens": True,
        "return_input_ids_in_sglext": True,
        "return_output_ids_in_sglext": True,
        "sampling_params": {"logprobs": 0},
    }
    done = await replayed(way, request=orjson.dumps({**way.request, **everything}))
    recording = way.recording(Spoken())
    if way.engine == "message":
        assert b"generation_token_ids" not in done.response.body
    elif done.response.body.startswith(b"data:") == recording.content_type.startswith("text"):
        assert done.response.body == recording.payload
    assert len(done.entries) == 1


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=30),
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=12),
    st.data(),
)
@settings(max_examples=25)
def test_any_tokens_arrive_the_same_through_every_engine(
    prompt: list[int], ids: list[int], data: st.DataObject
) -> None:

    log_probs = data.draw(st.lists(st.floats(-50, 0), min_size=len(ids), max_size=len(ids)))
    texts = data.draw(st.lists(st.text(max_size=3), min_size=len(ids), max_size=len(ids)))
    way = WAYS[data.draw(st.sampled_from([name for name in WAYS if not name.startswith("llama-c")]))]
    cut = in_chunks(data.draw(st.integers(0, 99)), longest=data.draw(st.integers(1, 300)))
    if way.path in ("/completion", "/inference/v1/generate"):
        prompt = Spoken().prompt  # there the request has it
    done = asyncio.run(replayed(way, Spoken(prompt, ids, log_probs, texts), cut=cut))
    (entry,) = done.entries
    assert (entry.prompt_token_ids, entry.generation_token_ids) == (prompt, ids)
    assert entry.generation_log_probs == log_probs


@every_way
@pytest.mark.parametrize("after", [0, 1])
async def test_a_client_that_hangs_up_leaves_a_complete_call(way: Way, after: int) -> None:
    sink, recorded = MemorySink(), RecordedEngine(way.recording(Spoken()), in_chunks(2, longest=90), way.answers)
    app = TokenCaptureMiddleware(Gateway(recorded, make_engine(way.engine), settings=way.options), sink=sink)
    gone = asyncio.Event()
    sent = 0

    async def listening(scope: Any, receive: Any, send: Any) -> None:
        """The application, for a client that leaves after so many messages of the response."""

        async def receive_or_leave() -> Any:
            receiving, leaving = asyncio.ensure_future(receive()), asyncio.ensure_future(gone.wait())
            done, pending = await asyncio.wait({receiving, leaving}, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
            return receiving.result() if receiving in done else {"type": "http.disconnect"}

        async def send_until_gone(message: Any) -> None:
            nonlocal sent
            sent += 1
            if sent > after:
                gone.set()
                raise OSError("the client is gone")
            await send(message)

        if after == 0:
            asyncio.get_running_loop().call_later(0, gone.set)
        await app(scope, receive_or_leave, send_until_gone)
        await send({"type": "http.response.start", "status": 499, "headers": []})

    await call_in_memory(listening, "POST", way.path, orjson.dumps(way.request))
    (entry,) = sink.entries
    assert entry.generation_token_ids == Spoken().ids
    assert (sink.marks, sink.open_calls) == ([], set())


async def test_the_headers_that_are_stored_are_those_that_were_chosen() -> None:
    way = WAYS["vllm-chat"]
    headers = [(b"x-session-id", b"s1"), (b"x-agent", b"a7"), (b"authorization", b"Bearer k")]
    for options, stored in (
        (GatewaySettings(), {"x-session-id": "s1"}),
        (GatewaySettings(session_headers=("x-agent",)), {"x-agent": "a7"}),
        (GatewaySettings(session_headers=()), None),
    ):
        sink = MemorySink()
        recorded = RecordedEngine(way.recording(Spoken()))
        app = TokenCaptureMiddleware(Gateway(recorded, make_engine("vllm"), settings=options), sink=sink)
        await call_in_memory(app, "POST", way.path, orjson.dumps(way.request), headers)
        assert (sink.entries[0].model_extra or {}).get("session_headers") == stored


@every_way
def test_what_a_reader_collected_is_freed_with_it_and_not_when_garbage_is_collected(way: Way) -> None:
    engine = make_engine(way.engine)
    reader = engine.reader(engine.paths[way.path], way.request)
    held = weakref.ref(reader)
    gc.disable()
    try:
        del reader
        assert held() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["vllm-chat", "vllm-chat-stream"])
async def test_a_call_leaves_nothing_to_the_garbage_collector(name: str) -> None:
    way = WAYS[name]
    app = TokenCaptureMiddleware(
        Gateway(RecordedEngine(way.recording(Spoken())), make_engine("vllm")), sink=MemorySink()
    )
    gc.disable()
    try:
        await call_in_memory(app, "POST", way.path, orjson.dumps(way.request))
        gc.collect()
        for _ in range(20):
            await call_in_memory(app, "POST", way.path, orjson.dumps(way.request))
        assert gc.collect() < 20
    finally:
        gc.enable()


def test_the_streams_of_a_whole_response_are_asked_for_as_such() -> None:
    for streaming, asked in (("auto", True), ("always", True), ("never", False)):
        body = CallBody.parse(Endpoint.CHAT, orjson.dumps(STREAM))
        assert body is not None
        body.decide_streaming(make_engine("vllm"), GatewaySettings(streaming=streaming).streaming)
        sent = orjson.loads(body.for_engine(make_engine("vllm"), orjson.dumps(STREAM)) or b"")
        assert (sent["stream"], sent["stream_options"]) == (asked, {"include_usage": True} if asked else None)


async def test_a_long_prompt_is_not_kept_in_copies_while_its_answer_is_waited_for() -> None:
    size = 8 * 2**20
    way = WAYS["vllm-chat"]
    recording = way.recording(Spoken())
    kept: list[int] = []

    class Engine:
        status, headers, is_event_stream = 200, [(b"content-type", b"application/json")], False

        @asynccontextmanager
        async def open(self, scope: Any, body: bytes, *, plain: bool) -> AsyncIterator[Any]:
            assert len(body) > size
            body = b""
            yield self

        async def read(self) -> bytes:
            kept.append(tracemalloc.get_traced_memory()[0])
            return recording.payload

    tracemalloc.start()
    try:
        gateway = TokenCaptureMiddleware(Gateway(Engine(), make_engine("vllm")), sink=MemorySink())
        body = b'{"messages":[{"role":"user","content":"' + b"x" * size + b'"}]}'
        response = await call_in_memory(gateway, "POST", way.path, body)
    finally:
        tracemalloc.stop()
    assert response.status == 200
    # The client's own text, and what the request says: neither the text as read nor as sent.
    assert kept[0] < 2.2 * size
