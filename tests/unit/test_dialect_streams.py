"""Streams of chat completions as streams of each dialect: the grammar holds, and nothing is lost or said twice."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.dialect_golden import places, replaced
from support.dialect_streams import Said, request_of, said_in_response, said_in_stream
from token_id_capture.server.dialects.chat import Dialect, read_generation
from token_id_capture.server.dialects.stream import TranslatedStream
from token_id_capture.server.dialects.translate import stream_writer, translated_response

RECORDINGS = Path(__file__).parents[1] / "data" / "recordings"
DIALECTS = pytest.mark.parametrize("dialect", list(Dialect))


def translated(dialect: Dialect, chunks: list[bytes]) -> tuple[bytes, bool]:
    """A stream, and whether it ended properly."""
    request = request_of(dialect)
    stream = TranslatedStream(stream_writer(request, "shown", as_events=True), "shown")
    written = stream.start() + b"".join(map(stream.feed, chunks))
    rest = stream.end()
    return written + (rest or b""), rest is not None


def whole(dialect: Dialect, response: dict[str, Any]) -> Said:
    generation = read_generation(response, "shown")
    assert generation is not None
    return said_in_response(dialect, translated_response(generation, request_of(dialect), "shown"))


def frames(*chunks: dict[str, Any], done: bool = True) -> bytes:
    data = [json.dumps(chunk).encode() for chunk in chunks] + ([b"[DONE]"] if done else [])
    return b"".join(b"data: " + one + b"\n\n" for one in data)


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta or {}, "finish_reason": finish, **more}]}


USAGE: dict[str, Any] = {
    "choices": [],
    "usage": {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}},
}


def message_of(payload: bytes) -> dict[str, Any]:
    """A whole chat response with what a recorded stream says."""
    message: dict[str, Any] = {"reasoning": "", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    response: dict[str, Any] = {}
    choice: dict[str, Any] = {}
    for line in payload.decode().splitlines():
        if not line.startswith("data: {"):
            continue
        parsed = json.loads(line[6:])
        response["usage"] = parsed.get("usage") or response.get("usage")
        for one in parsed["choices"]:
            choice = {**choice, **{key: value for key, value in one.items() if value is not None}}
            delta = one["delta"]
            message["reasoning"] += delta.get("reasoning") or delta.get("reasoning_content") or ""
            message["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                known = calls.setdefault(call["index"], {"function": {"name": "", "arguments": ""}})
                known["id"] = call.get("id") or known.get("id")
                function = call.get("function") or {}
                known["function"]["name"] += function.get("name") or ""
                known["function"]["arguments"] += function.get("arguments") or ""
    choice["message"] = {**message, "tool_calls": list(calls.values())}
    return {**response, "choices": [choice]}


def recorded_streams() -> list[Path]:
    return [
        path
        for path in sorted(RECORDINGS.rglob("*.response.sse"))
        if b'"chat.completion.chunk"' in path.read_bytes()
        and b"[DONE]" in path.read_bytes()
        and b'"index":1,"delta"' not in path.read_bytes()
        and b'"finish_reason":"abort"' not in path.read_bytes()
    ]


@DIALECTS
def test_recorded_streams_say_what_the_whole_response_says(dialect: Dialect) -> None:
    paths = recorded_streams()
    assert len(paths) > 20
    for path in paths:
        payload = path.read_bytes()
        said = said_in_stream(dialect, translated(dialect, [payload])[0])
        expected = whole(dialect, message_of(payload))
        assert said.as_values() == expected.as_values(), path.name


@DIALECTS
def test_recorded_whole_responses_are_translated(dialect: Dialect) -> None:
    read = 0
    for path in sorted(RECORDINGS.rglob("*.response.json")):
        recorded = json.loads(path.read_bytes())
        body = recorded.get("body")
        if recorded["status"] == 200 and isinstance(body, dict) and body.get("object") == "chat.completion":
            if body["choices"][0]["finish_reason"] == "abort":
                continue
            message = body["choices"][0]["message"]
            said = whole(dialect, body)
            assert said.text == (message.get("content") or "")
            assert len(said.calls) == len(message.get("tool_calls") or ())
            read += 1
    assert read > 20


@st.composite
def generations(draw: st.DrawFn) -> tuple[list[dict[str, Any]], Said]:
    """The deltas of a generation as an engine may mix them, and what it says."""
    pieces = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=5)
    reasoning, text = draw(st.lists(pieces, max_size=3)), draw(st.lists(pieces, max_size=3))
    arguments = [json.dumps(value) for value in draw(st.lists(st.dictionaries(pieces, pieces, max_size=2), max_size=3))]
    arguments = [draw(st.sampled_from([one, one[:-1]])) for one in arguments]
    names = [draw(st.sampled_from(["look", "team__ask", "patch"])) for _ in arguments]
    queues: list[list[dict[str, Any]]] = [
        [{"reasoning_content": piece} for piece in reasoning] + [{"content": piece} for piece in text]
    ]
    for index, (name, one) in enumerate(zip(names, arguments, strict=True)):
        cuts = sorted(draw(st.lists(st.integers(0, len(one)), max_size=3)))
        cut = [one[start:end] for start, end in zip([0, *cuts], [*cuts, len(one)], strict=True)]
        head = {"index": index, "id": f"call-{index}", "type": "function", "function": {"name": name, "arguments": ""}}
        queues.append([head, *({"index": index, "function": {"arguments": piece}} for piece in cut)])
        queues[-1] = [{"tool_calls": [call]} for call in queues[-1]]
    if draw(st.booleans()):
        queues = [[delta for queue in queues for delta in queue]]  # as engines do it
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    while any(queues):
        queue = draw(st.sampled_from([queue for queue in queues if queue]))
        delta = queue.pop(0)
        if draw(st.booleans()) and "tool_calls" in delta and "tool_calls" in deltas[-1]:
            deltas[-1]["tool_calls"].extend(delta["tool_calls"])
        else:
            deltas.append(delta)
        if draw(st.booleans()):
            deltas.append({})
    calls = [(f"call-{index}", name, one) for index, (name, one) in enumerate(zip(names, arguments, strict=True))]
    return deltas, Said("".join(reasoning), "".join(text), calls)


@DIALECTS
@given(generations(), st.data())
def test_any_mixture_of_deltas_in_any_chunks_keeps_the_grammar_and_says_all(
    dialect: Dialect, generation: tuple[list[dict[str, Any]], Said], data: st.DataObject
) -> None:
    deltas, expected = generation
    chunks = [chunk(delta) for delta in deltas]
    if data.draw(st.booleans()):
        chunks[-1]["choices"][0]["finish_reason"] = "stop"
    else:
        chunks.append(chunk({}, "stop"))
    if data.draw(st.booleans()):
        chunks = [{**one, "usage": USAGE["usage"]} for one in chunks]
    else:
        chunks.append(USAGE)
    payload = frames(*chunks)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(payload)), max_size=6)))
    pieces = [payload[start:end] for start, end in zip([0, *cuts], [*cuts, len(payload)], strict=True)]
    said = said_in_stream(dialect, translated(dialect, pieces)[0])
    message: dict[str, Any] = {"reasoning": expected.reasoning, "content": expected.text}
    message["tool_calls"] = [
        {"id": call_id, "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in expected.calls
    ]
    same = whole(dialect, {"choices": [{"message": message, "finish_reason": "stop"}], "usage": USAGE["usage"]})
    by_id = sorted(said.as_values().calls)
    assert by_id == sorted(same.as_values().calls)
    said.calls, same.calls = [], []
    assert said == same
    if dialect is Dialect.MESSAGES:
        assert (said.reasoning, said.text) == (expected.reasoning, expected.text)


@DIALECTS
@pytest.mark.parametrize(
    "payload",
    [
        frames(chunk({"content": "half"}), done=False),
        frames(chunk({"content": "half"}), done=True),
        frames(chunk({"content": "no count"}, "stop"), done=False),
        b"",
    ],
)
def test_a_stream_that_is_not_whole_has_no_end(dialect: Dialect, payload: bytes) -> None:
    written, ended = translated(dialect, [payload])
    assert not ended
    for terminal in (b"message_stop", b"message_delta", b"response.completed", b"finishReason"):
        assert terminal not in written


@DIALECTS
def test_the_end_of_a_stream_may_be_told_by_its_count_alone(dialect: Dialect) -> None:
    written, ended = translated(dialect, [frames(chunk({"content": "all"}, "stop"), USAGE, done=False)])
    assert ended
    assert said_in_stream(dialect, written).text == "all"


@DIALECTS
def test_nothing_is_ended_before_the_chat_stream_is(dialect: Dialect) -> None:
    request = request_of(dialect)
    stream = TranslatedStream(stream_writer(request, "shown", as_events=True), "shown")
    before = stream.start() + stream.feed(frames(chunk({"content": "all"}, "stop"), USAGE, done=False))
    for terminal in (b"content_block_stop", b"output_item.done", b"message_delta", b"finishReason"):
        assert terminal not in before


@DIALECTS
def test_nothing_follows_an_error(dialect: Dialect) -> None:
    error = {"error": {"message": "out of memory", "type": "server_error", "code": 500}}
    payload = frames(chunk({"content": "half"}), error, chunk({"content": "more"}, "stop"), USAGE)
    written, ended = translated(dialect, [payload])
    assert ended
    error_said = said_in_stream(dialect, written).error
    assert "out of memory" in error_said["message"]


@DIALECTS
def test_an_aborted_generation_is_an_error_that_clients_repeat(dialect: Dialect) -> None:
    written, _ = translated(dialect, [frames(chunk({"content": "half"}), chunk({}, "abort"), USAGE)])
    assert said_in_stream(dialect, written).error is not None


@DIALECTS
def test_a_call_that_goes_on_after_its_end_is_an_error_and_not_dropped(dialect: Dialect) -> None:
    def call(index: int, arguments: str, **more: Any) -> dict[str, Any]:
        return {"tool_calls": [{"index": index, "function": {"name": "look", "arguments": arguments}, **more}]}

    payload = frames(chunk(call(0, "{}", id="a")), chunk(call(1, "{}", id="b")), chunk(call(0, "{}")), USAGE)
    written, ended = translated(dialect, [payload])
    assert ended
    assert "tool call 0" in said_in_stream(dialect, written).error["message"]


@pytest.mark.parametrize(
    ("finish", "calls", "stopped", "reason"),
    [
        ("stop", False, None, ("end_turn", None)),
        ("stop", False, "END", ("stop_sequence", "END")),
        ("stop", True, None, ("tool_use", None)),
        ("tool_calls", True, None, ("tool_use", None)),
        ("length", True, None, ("max_tokens", None)),
        ("content_filter", False, None, ("refusal", None)),
        ("something new", False, None, ("end_turn", None)),
    ],
)
def test_why_a_generation_ended_is_said_in_messages(
    finish: str, calls: bool, stopped: str | None, reason: tuple[str, str | None]
) -> None:
    call = {"id": "a", "function": {"name": "look", "arguments": "{}"}}
    message = {"content": "x", "tool_calls": [call] if calls else []}
    choice = {"message": message, "finish_reason": finish, "stop_reason": stopped}
    assert whole(Dialect.MESSAGES, {"choices": [choice], "usage": USAGE["usage"]}).stop == reason


ODD: tuple[Any, ...] = (None, 7, "x", [None])
CALLED = {"index": 0, "id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
SAID = {"role": "assistant", "content": "t", "reasoning": "r", "tool_calls": [CALLED]}


@DIALECTS
def test_no_wrong_type_in_an_engines_response_fails_or_breaks_the_grammar(dialect: Dialect) -> None:
    response = {"choices": [{"index": 0, "finish_reason": "stop", "message": SAID}], "usage": USAGE["usage"]}
    for path, odd in product(places(response)[1:], ODD):
        generation = read_generation(replaced(response, path, odd), "shown")
        if generation is not None:
            said_in_response(dialect, translated_response(generation, request_of(dialect), "shown"))
    events = [chunk(SAID), {**chunk({}, "stop"), "usage": USAGE["usage"]}]
    for path, odd in product(places(events)[1:], ODD):
        written, ended = translated(dialect, [frames(*replaced(events, path, odd))])
        if ended:
            said_in_stream(dialect, written)


def test_a_call_behind_an_unfinished_one_waits_for_its_end() -> None:
    def call(index: int, arguments: str) -> dict[str, Any]:
        function = {"name": "look", "arguments": arguments}
        return chunk({"tool_calls": [{"index": index, "id": str(index), "function": function}]})

    pieces = [call(0, '{"a": ['), call(1, "{}"), *[call(0, "{},")] * 3, call(0, "{}]}"), chunk({}, "stop"), USAGE]
    said = said_in_stream(Dialect.MESSAGES, translated(Dialect.MESSAGES, [frames(*pieces)])[0])
    assert said.calls == [("0", "look", '{"a": [{},{},{},{}]}'), ("1", "look", "{}")]


def test_a_call_ends_as_soon_as_the_next_one_begins() -> None:
    def call(index: int) -> dict[str, Any]:
        return chunk({"tool_calls": [{"index": index, "id": "a", "function": {"name": "look", "arguments": "{}"}}]})

    stream = TranslatedStream(stream_writer(request_of(Dialect.RESPONSES), "s", as_events=True), "s")
    written = stream.start() + stream.feed(frames(call(0), call(1), done=False))
    assert written.count(b"response.output_item.done") == 2  # the event's name and its data
