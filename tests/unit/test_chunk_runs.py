"""Chunks of one shape that are read together say the same as those that are parsed one by one."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engine_pieces import captured
from token_id_capture.server.engines.base import Endpoint
from token_id_capture.server.engines.vllm import VllmEngine
from token_id_capture.server.text.sse import EventParser
from token_id_capture.server.wire.chunk_runs import ChunkShapes
from token_id_capture.server.wire.redaction import client_view

ASKED: list[dict[str, Any]] = [
    {},
    {"logprobs": True},
    {"logprobs": True, "return_token_ids": True},
    {"include_reasoning": False},
    {"n": 2},
]
AWKWARD = ['"', "\\", "\n", "\u2028", "é", "\U0001f600", '"token_ids":[1]', '"logprobs":{"content":[{', "token_id:7"]
TEXTS = st.lists(st.sampled_from([*AWKWARD, " the", "a", "]}"]), max_size=2).map("".join)
ODD: st.SearchStrategy[Any] = st.sampled_from([None, True, -1, 2**32, 1.5, "7", [], {}, [None], 1e-320])


class ParsesEach(VllmEngine):
    """Derived from the engine adapter, so none of its arrays may be packed and every chunk is parsed."""


def chunk(choice: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "m", "choices": [choice], **more}


def entry(token: str, log_prob: Any = -0.5) -> dict[str, Any]:
    return {"token": token, "logprob": log_prob, "bytes": list(token.encode()), "top_logprobs": []}


def token(text: str, ids: list[int], finish: str | None = None, index: int = 0, member: str = "content") -> Any:
    """A chunk of these ids, as vLLM writes it."""
    delta: dict[str, Any] = {member: text} if member else {}
    if member == "arguments":
        delta = {"content": None, "tool_calls": [{"index": 0, "function": {"arguments": text}}]}
    log_probs = {"content": [entry(text) for _ in ids]}
    return chunk({"index": index, "delta": delta, "logprobs": log_probs, "finish_reason": finish, "token_ids": ids})


FIRST = chunk({"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}, prompt_token_ids=[1, 2])


def events(*chunks: Any) -> list[bytes]:
    return [b"data: " + orjson.dumps(each) + b"\n\n" for each in chunks]


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """What vLLM sends, with now and then something else in it."""
    chunks = [FIRST]
    count = 0
    for _ in range(draw(st.integers(0, 9))):
        member = draw(st.sampled_from(["content", "content", "content", "reasoning", "arguments", ""]))
        for _ in range(draw(st.integers(1, 4))):
            ids = draw(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=2))
            one = token(draw(TEXTS), ids, index=draw(st.sampled_from([0, 0, 0, 0, 1])), member=member)
            change = draw(st.integers(0, 40))
            (choice,) = one["choices"]
            if change == 0:
                choice[draw(st.sampled_from(list(choice)))] = draw(ODD)
            elif change == 1:
                choice["logprobs"]["content"][0][draw(st.sampled_from(["token", "logprob", "id", "bytes"]))] = draw(ODD)
            elif change == 2:
                choice["weight_versions"] = [{"version": "7"}]
            elif change == 3:
                one["usage"] = {"completion_tokens": count}
            elif change == 4:
                choice["delta"]["role"] = "assistant"
            chunks.append(one)
            count += len(ids)
    last = draw(st.lists(st.integers(0, 9), min_size=1, max_size=1))
    chunks.append(token("", last, "stop"))
    usage = {"completion_tokens": count + 1}
    lines = [*events(*chunks, {"id": "chatcmpl-1", "choices": [], "usage": usage}), b"data: [DONE]\n\n"]
    if not draw(st.integers(0, 4)):
        lines.insert(draw(st.integers(0, len(lines))), draw(st.sampled_from([b": ping\n\n", b"data: x\n\n", b"\n"])))
    text = b"".join(lines)
    if not draw(st.integers(0, 3)):
        return damaged(text, draw(st.integers(0, 2**32)))
    return text.replace(b"\n", b"\r\n") if not draw(st.integers(0, 10)) else text


def damaged(text: bytes, seed: int) -> bytes:
    chance = random.Random(seed)
    at, length = chance.randrange(len(text) + 1), chance.choice([1, 1, 2, 20])
    taken = text[at : at + length]
    put = chance.choice([b"", taken * 2, b"]", b",", b"0", b"e9", b'"', b"\xff", b"\\ud83d", b"\\x", b"true", b"\n"])
    return text[:at] + put + text[at + length :]


@given(text=streams(), asked=st.sampled_from(ASKED), seed=st.integers(0, 2**32))
@settings(max_examples=120, deadline=None)
def test_a_stream_is_stored_and_shown_as_if_every_chunk_were_parsed(
    text: bytes, asked: dict[str, Any], seed: int
) -> None:
    chance = random.Random(seed)
    cuts = sorted(chance.randrange(len(text) + 1) for _ in range(chance.choice([0, 0, 2, 30])))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True) if start < end]
    together, each = (asyncio.run(captured(engine, asked, pieces)) for engine in (VllmEngine(), ParsesEach()))
    assert together == each


def shapes(asked: dict[str, Any]) -> ChunkShapes:
    hidden = VllmEngine().hidden(Endpoint.CHAT, asked)
    return ChunkShapes(client_view(hidden, hide_usage=True), packed=True)


def learnt(text: bytes, asked: dict[str, Any]) -> ChunkShapes:
    known = shapes(asked)
    (event,) = EventParser().feed(text)
    assert event.data is not None
    known.learn(event, orjson.loads(event.data))
    return known


@pytest.mark.parametrize("member", ["content", "reasoning", "arguments", ""])
@pytest.mark.parametrize("asked", [{}, {"logprobs": True, "return_token_ids": True}])
def test_chunks_of_one_shape_are_one_run_whatever_they_say(member: str, asked: dict[str, Any]) -> None:
    texts = ["a", "", 'quo"ted', "back\\slash", "é\n", "\U0001f600"] if member else [""] * 6
    ids = [[0], [7, 8], [151_000], [3], [4], [5]]
    first, *rest = events(*(token(text, each, member=member) for text, each in zip(texts, ids, strict=True)))
    data = b"".join(rest)
    known = learnt(first, asked)
    halves = (known.run(data, 0), known.run(data, 0))
    assert {run and run.end for run in halves} == {len(data)}
    chunk = known.read()
    assert chunk is not None
    assert known.read() is None
    (choice,) = chunk["choices"]
    assert choice["token_ids"] == [7, 8, 151_000, 3, 4, 5] * 2
    assert list(choice["logprobs"].values) == [-0.5] * 12
    said = "".join(texts[1:] * 2)
    if member == "arguments":
        assert choice["delta"]["tool_calls"][0]["function"] == {"arguments": said}
    else:
        assert choice["delta"] == ({member: said} if member else {})
    assert all(run is not None and (run.visible == data) == bool(asked) for run in halves)


@pytest.mark.parametrize(
    "other",
    [
        token("b", [8], "stop"),
        token("token_id:8", [8]),
        token("b", [8], index=1),
        token("b", [8], member="reasoning"),
        token("b", []),
        {**token("b", [8]), "usage": {"completion_tokens": 1}},
        {**token("b", [8]), "id": "chatcmpl-2"},
    ],
)
def test_a_chunk_of_another_shape_ends_a_run(other: Any) -> None:
    known = learnt(events(token("a", [7]))[0], {})
    assert known.run(b"".join(events(other)), 0) is None
    data = b"".join(events(token("c", [9]), other))
    run = known.run(data, 0)
    assert run is not None
    assert data[run.end :] == events(other)[0]


def test_shapes_that_nothing_follows_are_soon_looked_for_no_more() -> None:
    known = shapes({})
    for count in range(6):
        (event,) = EventParser().feed(events({**token("a", [7]), "usage": {"completion_tokens": count}})[0])
        assert event.data is not None
        known.learn(event, orjson.loads(event.data))
    last = events({**token("a", [8]), "usage": {"completion_tokens": 5}})[0]
    assert known.run(last, 0) is None
    assert known.run(last.replace(b":5}", b":3}"), 0) is not None
