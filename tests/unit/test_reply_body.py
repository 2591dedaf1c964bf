"""A response whose arrays are cut out says the same, to the store and to the client, as one that is parsed whole."""

import random
import tracemalloc
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from token_id_capture.server.engines.base import Endpoint, PackedLogProbs
from token_id_capture.server.engines.vllm import VllmEngine
from token_id_capture.server.text.sse import EventParser
from token_id_capture.server.wire.entries import CapturedRequest, NotCapturableError, entries_from
from token_id_capture.server.wire.fast_parse import BodyReader, ResponseBody
from token_id_capture.server.wire.prompt_cache import KnownTexts
from token_id_capture.server.wire.redaction import ClientView, client_view
from token_id_capture.server.wire.response import read_response
from token_id_capture.sink import CaptureContext
from token_id_capture.tokens import TokenIds

_ENGINE = VllmEngine()
_ASKED: list[dict[str, Any]] = [
    {},
    {"logprobs": True},
    {"return_token_ids": True},
    {"logprobs": True, "return_token_ids": True},
    {"include_reasoning": False},
]
_AWKWARD = [
    '"',
    "\\",
    "]",
    "]}]}",
    '"token_ids":[1]',
    '"logprobs":{"content":[{',
    "\n",
    "é",
    "\U0001f600",
    "token_id:7",
]
_TEXTS = st.lists(st.sampled_from([*_AWKWARD, " the", "a"]), max_size=3).map("".join)
_IDS = st.lists(st.one_of(st.integers(0, 200), st.integers(0, 2**32 - 1)), max_size=6)
_ODD: st.SearchStrategy[Any] = st.sampled_from([None, True, -1, 2**32, 1.5, "7", [], {}, [None], [True], [[1]], "x"])


@st.composite
def _entries(draw: st.DrawFn, count: int) -> Any:
    entries = []
    for _ in range(count):
        entry = {"token": draw(_TEXTS), "logprob": draw(st.floats(-20, 0)), "bytes": [65], "top_logprobs": []}
        change = draw(st.integers(0, 60))
        if change == 0:
            entry["id"] = draw(st.one_of(_ODD, st.integers(0, 200)))
        elif change == 1:
            entry["logprob"] = draw(_ODD)
        elif change == 2:
            entry["top_logprobs"] = [{"token": "x", "logprob": -3.0}]
        elif change == 3:
            entry.pop(draw(st.sampled_from(list(entry))))
        elif change == 4:
            entry["token_id"] = draw(st.integers(0, 200))
        entries.append(entry)
    return entries


@st.composite
def _responses(draw: st.DrawFn, prompt: list[int]) -> bytes:
    """What vLLM sends, with now and then something else in it."""
    choices = []
    for index in range(draw(st.sampled_from([1, 1, 1, 1, 2, 0]))):
        ids: Any = draw(_IDS)
        choice = {
            "index": index,
            "message": {"role": "assistant", "content": draw(_TEXTS)},
            "logprobs": draw(st.sampled_from([None, {"content": None}])) if draw(st.integers(0, 30)) == 0 else None,
            "finish_reason": "stop",
            "token_ids": ids,
        }
        if draw(st.integers(0, 8)):
            choice["logprobs"] = {"content": draw(_entries(len(ids)))}
        if not draw(st.integers(0, 20)):
            choice[draw(st.sampled_from(list(choice)))] = draw(_ODD)
        choices.append(choice)
    count = sum(len(choice["token_ids"]) if isinstance(choice["token_ids"], list) else 0 for choice in choices)
    response: dict[str, Any] = {
        "id": "chatcmpl-1",
        "model": "policy",
        "choices": choices,
        "usage": {"completion_tokens": count + draw(st.sampled_from([0, 0, 0, 0, 1]))},
        "prompt_token_ids": prompt,
    }
    if not draw(st.integers(0, 20)):
        response[draw(st.sampled_from(list(response)))] = draw(_ODD)
    if not draw(st.integers(0, 5)):
        items = draw(st.permutations(list(response.items())))
        response = dict(items)
    text = orjson.dumps(response)
    return _damaged(text, draw(st.integers(0, 2**32))) if not draw(st.integers(0, 4)) else text


def _damaged(text: bytes, seed: int) -> bytes:
    """Some bytes of the text changed, lost or doubled."""
    chance = random.Random(seed)
    at, length = chance.randrange(len(text) + 1), chance.choice([1, 1, 2, 20])
    taken = text[at : at + length]
    put = chance.choice([b"", taken * 2, b"]", b",", b"0", b"e", b'"', b"\xff", b"\\u0041", b"true", b" "])
    return text[:at] + put + text[at + length :]


def _stored(response: ResponseBody) -> Any:
    """What becomes of a response: the fields of its entries, or why there are none."""
    if not isinstance(response.parsed, dict):
        return None
    served = read_response(_ENGINE.reader(Endpoint.CHAT, {}), Endpoint.CHAT, response.parsed)
    try:
        entries = entries_from(CaptureContext("r", "c", None), CapturedRequest("m", {}, None), served)
    except NotCapturableError as refused:
        return refused.reason, refused.detail
    return [entry.model_dump(exclude={"created_at"}) for entry in entries]


def _seen(view: ClientView, response: ResponseBody) -> bytes | None:
    """What the client gets; None where it gets nothing of the response."""
    try:
        return view.response(response)
    except ValueError:
        return None


def _assert_alike(text: bytes, known: KnownTexts) -> bool:
    """Whether arrays were cut out; either way the response says the same."""
    whole, cut = ResponseBody.parse(text), BodyReader(known, "r").whole(text)
    for asked in _ASKED:
        view = client_view(_ENGINE.hidden(Endpoint.CHAT, asked), hide_usage=False)
        assert _seen(view, cut) == _seen(view, whole)
    assert (cut.parsed is None) == (whole.parsed is None)
    assert _stored(cut) == _stored(whole)
    return isinstance(cut.parsed, dict) and isinstance(cut.parsed.get("prompt_token_ids"), TokenIds)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_cut_and_whole_responses_of_a_rollout_say_the_same(data: st.DataObject) -> None:
    known = KnownTexts(capacity=data.draw(st.sampled_from([0, 1_500, 30_000])))
    prompt: list[int] = data.draw(_IDS)
    for _ in range(3):
        _assert_alike(data.draw(_responses(prompt)), known)
        kept = data.draw(st.integers(0, len(prompt))) if not data.draw(st.integers(0, 3)) else len(prompt)
        prompt = prompt[:kept] + data.draw(_IDS)


def _response(prompt: str, ids: list[int] | None = None, **more: Any) -> bytes:
    ids = [7, 8] if ids is None else ids
    content = [{"token": "t", "logprob": -0.5, "bytes": [116], "top_logprobs": []} for _ in ids]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "tt"},
        "logprobs": {"content": content},
        "finish_reason": "stop",
        "token_ids": ids,
        **more,
    }
    response = {"id": "x", "model": "m", "choices": [choice], "usage": {"completion_tokens": len(ids)}}
    return orjson.dumps(response)[:-1] + b',"prompt_token_ids":' + prompt.encode() + b"}"


def test_what_an_engine_sends_is_cut() -> None:
    known = KnownTexts()
    assert _assert_alike(_response("[1,2]"), known)
    assert _assert_alike(_response("[1,2,7,8,9]"), known)
    cut = BodyReader(known, "r").whole(_response("[1,2]"))
    assert isinstance(cut.parsed["choices"][0]["logprobs"], PackedLogProbs)
    assert cut.parsed["choices"][0]["token_ids"] == [7, 8]


def test_a_prompt_is_read_from_where_it_goes_on_and_no_number_is_split() -> None:
    known = KnownTexts()
    for prompt in ("[1,2]", "[1,23]", "[1,2,3]", "[1,2,3]", "[1,2,3,4,5]", "[1]", "[1,2,3,4,5,6]"):
        assert _assert_alike(_response(prompt), known), prompt


def test_what_is_no_array_of_ids_is_parsed_whole() -> None:
    known = KnownTexts()
    _assert_alike(_response("[1,2]"), known)
    odd = (
        "[1,2,]",
        "[1,2,,3]",
        "[1,2,true]",
        "[1,2,-3]",
        "[1,2,3.0]",
        "[1,2 3]",
        "[1,2,3",
        "[]",
        "null",
        "[[1],2]",
        "[01]",
    )
    for prompt in odd:
        _assert_alike(_response(prompt), known)


def test_generated_ids_that_are_booleans_are_refused_as_ever() -> None:
    text = _response("[1,2]").replace(b"[7,8]", b"[7,true]")
    assert not _assert_alike(text, KnownTexts())


def test_a_key_that_is_like_one_of_ours_or_comes_twice_changes_nothing() -> None:
    known = KnownTexts()
    twice = (b'"token_ids":[5],"token_ids":null,', b'"token_ids":"zz",', b'"logprobs":5,')
    for key in (b'"x\\"token_ids":[5],', b'"tok\\u0065n_ids":[5],', *twice):
        _assert_alike(_response("[1,2]").replace(b'"finish_reason"', key + b'"finish_reason"'), known)
        _assert_alike(_response("[1,2]").replace(b'"id":"x"', key + b'"id":"x"'), known)


def test_a_token_that_looks_like_the_end_of_the_log_probabilities_is_no_end() -> None:
    text = _response("[1,2]").replace(b'"token":"t"', orjson.dumps({"token": '"top_logprobs":[]}]}'})[1:-1])
    _assert_alike(text, KnownTexts())
    raw = _response("[1,2]").replace(b'"token":"t"', b'"token":"t","more":{"x":[{"top_logprobs":[]}]}')
    _assert_alike(raw, KnownTexts())


def test_text_that_is_no_utf_8_is_no_json_wherever_it_is() -> None:
    for place in (b'"token":"t"', b'"bytes":[116]'):
        _assert_alike(_response("[1,2]").replace(place, place + b',"x":"\xff"', 1), KnownTexts())


def test_what_is_known_of_prompts_takes_no_more_than_its_capacity() -> None:
    known = KnownTexts(capacity=5_000)
    for number in range(100):
        text = orjson.dumps(list(range(number, number + 50)))
        known.remember(f"r{number % 7}", text, known.read(f"r{number % 7}", text))
        assert 0 <= known.held <= 5_000


def test_a_comma_right_after_the_bracket_is_refused_after_an_empty_prompt_too() -> None:
    for empty, then in (("[]", "[,1]"), ("[ ]", "[ ,1]")):
        known = KnownTexts()
        _assert_alike(_response(empty), known)
        assert not _assert_alike(_response(then), known)


def test_an_event_of_which_nothing_is_hidden_keeps_its_lines() -> None:
    raw = b'data: {"choices":[],"id":"\\u00e9",\ndata: "prompt_token_ids":[1,2]}\n\n'
    (event,) = EventParser().feed(raw)
    asked = {"return_token_ids": True, "logprobs": True}
    view = client_view(_ENGINE.hidden(Endpoint.CHAT, asked), hide_usage=False)
    data = event.data
    assert data is not None
    read = BodyReader(KnownTexts(), "r").chunk(data)
    assert isinstance(read.parsed["prompt_token_ids"], TokenIds)
    assert view.event(event, read) == raw


def test_a_log_probability_that_nests_deeply_is_read_as_ever() -> None:
    # How deep the interpreter reads depends on its version: a thousand levels, or ten thousand.
    for depth, is_read in ((500, True), (100_000, False)):
        nested = b"[" * depth + b"]" * depth
        read = BodyReader(KnownTexts(), "r").whole(_response("[1,2]").replace(b"[116]", nested, 1))
        assert (read.parsed is not None) == is_read


def test_an_id_that_is_a_text_is_compared_like_any_other() -> None:
    for name in (b'"id"', b'"token_id"'):
        text = _response("[1,2]").replace(b'"token":"t"', b'"token":"t",' + name + b':"none"')
        assert not _assert_alike(text, KnownTexts())


def test_choices_that_come_twice_are_hidden_twice() -> None:
    text = _response("[1,2]").replace(b'"id":"x"', b'"choices":[{"message":{"reasoning":"so"},"logprobs":5}],"id":"x"')
    _assert_alike(text.replace(b'"logprobs":{"content":[{', b'"logprobes":{"content":[{'), KnownTexts())


def test_log_probabilities_that_come_twice_are_not_taken_for_each_other() -> None:
    second = b'[]}],"content":[{"token":"token_id:9","logprob":-1,"top_logprobs":[]}]}'
    text = _response("[1,2]", [7]).replace(b"[]}]}", second)
    assert not _assert_alike(text, KnownTexts())


def test_ids_that_log_probabilities_name_as_floats_are_the_same_ids() -> None:
    text = _response("[1,2]", [7]).replace(b'"content":[{"token":"t"', b'"content": [{"token":"t","id":7.0')
    assert _assert_alike(text, KnownTexts())
    assert isinstance(_stored(BodyReader(KnownTexts(), "r").whole(text)), list)


def test_many_short_prompts_take_no_more_memory_than_long_ones() -> None:
    known = KnownTexts(capacity=2**18)
    tracemalloc.start()
    try:
        for number in range(4_000):
            known.remember(f"rollout-{number}", b"[1]", known.read(f"rollout-{number}", b"[1]"))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1.5 * 2**18


def test_prompts_of_calls_that_nobody_stores_do_not_keep_each_other() -> None:
    known = KnownTexts()
    text = "[0"
    tracemalloc.start()
    try:
        for number in range(1_000):
            text += f",{number}"
            known.remember("r", f"{text}]".encode(), known.read("r", f"{text}]".encode()))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 50_000
