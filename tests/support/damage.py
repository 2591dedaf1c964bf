"""Responses of engines with something wrong in them, and what must hold whatever it is.

Used by the tests for thousands of cases, and by ``scripts/fuzz-responses`` for as many as you like.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from random import Random
from typing import Any

import orjson

from support.spoken import Spoken
from support.ways import WAYS, Way
from token_id_capture.server.engines import make_engine
from token_id_capture.server.gateway import Gateway
from token_id_capture.testing.replay import RecordedEngine, Recording, Replayed, in_chunks, replay_through, whole

_NATIVE = "completion_probabilities"
NOT_A_NUMBER = "<NaN>"

PROMPT = [1001, 1002, 1003]

# Odd values of every type. Strings become no ids, but for one that spells an id.
ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    12,
    12.0,
    2**31,
    2**32,
    2**63,
    1e308,
    -1e308,
    -9999.0,
    0.5,
    NOT_A_NUMBER,
    "",
    "x",
    "token_id:7",
    "\ud7ff",
    [],
    {},
    [1],
    [[]],
    [True],
    {"a": 1},
    "A" * 3000,
    list(range(600)),
)


def damaged_call(numbers: Random) -> tuple[Way, Recording]:
    """One way of saying something, with up to four things wrong in the response."""
    name = numbers.choice(sorted(WAYS))
    way = WAYS[name]
    length = numbers.randint(1, 5)
    spoken = Spoken(
        prompt=PROMPT,
        ids=[numbers.randint(2000, 9000) for _ in range(length)],
        log_probs=[-numbers.random() * 9 for _ in range(length)],
        texts=[numbers.choice(["a", "é", "🙂", "", "\n"]) for _ in range(length)],
    )
    recording = way.recording(spoken)
    streams = recording.content_type.startswith("text/event-stream")
    payload = _damaged_stream(recording.payload, numbers) if streams else _damaged_json(recording.payload, numbers)
    return way, replace(recording, payload=payload)


async def outcome(way: Way, recording: Recording, numbers: Random) -> Replayed:
    """Send it through the gateway, in some chunks or other, sometimes after a good call of the same rollout."""
    engine = "auto" if way.path.startswith("/v1/") and numbers.random() < 0.2 else way.engine
    cut = (
        in_chunks(numbers.randrange(10**6), longest=numbers.choice([3, 50, 4000])) if numbers.random() < 0.3 else whole
    )
    request = orjson.dumps(way.request)
    recorded = RecordedEngine(recording, cut, way.answers)
    gateway = Gateway(recorded, make_engine(engine), settings=way.options)
    if numbers.random() < 0.5:
        recorded.recording = way.recording(Spoken(prompt=PROMPT[: numbers.randint(1, len(PROMPT))]))
        await replay_through(gateway, recorded, request)
        recorded.recording = recording
    return await replay_through(gateway, recorded, request)


def check(recording: Recording, done: Replayed) -> str:
    """Hold the promises against what became of a damaged response; returns the outcome in a word.

    Raises:
        AssertionError: one of them is broken.
    """
    unread = done.response.status == 502  # what cannot be read is not passed on
    assert unread or done.response.status == recording.status
    assert bool(done.entries) != bool(done.marks), "stored and marked, or neither"
    assert done.open == bool(done.marks), "the intent is not what the outcome is"
    if done.marks:
        return done.marks[0].partition(":")[0]
    documents = list(_documents(recording))
    counted = _counted(documents)
    # Some requests and llama-server's tokenizer name the prompt, all other responses.
    prompts = [Spoken().prompt, *(array for document in documents for array in _arrays(document))]
    generated = 0
    for entry in done.entries:
        ids, log_probs = entry.generation_token_ids.tolist(), entry.generation_log_probs.tolist()
        assert len(ids) == len(log_probs)
        assert all(type(token) is int and 0 <= token < 2**32 for token in ids)
        assert all(math.isfinite(value) and value > -9999 for value in log_probs)
        prompt = entry.prompt_token_ids.tolist()
        assert prompt, "nothing is sampled after nothing"
        assert prompt in prompts, f"{prompt} is stored as the prompt, which nobody sent"
        generated += len(ids)
    assert generated == counted, f"{generated} ids are stored, the engine counted {counted}"
    said = {value for document in documents for value in _numbers(document)}
    stored = {token for entry in done.entries for token in entry.generation_token_ids}
    assert stored <= said, f"ids that the engine did not send: {sorted(stored - said)}"
    if len(documents) == 1 and len(done.entries) == 1:
        for named in _named(documents[0]):
            ids = done.entries[0].generation_token_ids.tolist()
            assert named == ids, f"{ids} are stored, and the log probabilities are for {named}"
    return "stored"


def _damaged_json(payload: bytes, numbers: Random) -> bytes:
    document = orjson.loads(payload)
    for _ in range(numbers.randint(1, 4)):
        _break_something(document, numbers)
    return _dumped(document, numbers)


def _damaged_stream(payload: bytes, numbers: Random) -> bytes:
    frames = [frame + b"\n\n" for frame in payload.split(b"\n\n") if frame]
    for _ in range(numbers.randint(1, 4)):
        position = numbers.randrange(len(frames))
        action = numbers.randrange(8)
        if action == 0 and len(frames) > 1:
            del frames[position]
        elif action == 1:
            frames.insert(numbers.randrange(len(frames) + 1), frames[position])
        elif action == 2:
            frames[position], frames[0] = frames[0], frames[position]
        elif action == 3:
            frames[position] = frames[position][: numbers.randrange(len(frames[position]))] + b"\n\n"
        else:
            head, _, data = frames[position].partition(b"data: ")
            with suppress(orjson.JSONDecodeError):  # it was damaged before, or is [DONE]
                frames[position] = head + b"data: " + _damaged_json(data, numbers) + b"\n\n"
    return b"".join(frames)


def _dumped(document: Any, numbers: Random) -> bytes:
    word = numbers.choice([b"NaN", b"Infinity", b"-Infinity"])
    return orjson.dumps(document).replace(orjson.dumps(NOT_A_NUMBER), word)


def _break_something(document: Any, numbers: Random) -> None:
    """Change one place of a JSON document."""
    places = list(_places(document))
    if not places:
        return
    holder, key = numbers.choice(places)
    action = numbers.randrange(7)
    if action == 0:
        del holder[key]
    elif action == 1:
        holder[key] = deepcopy(numbers.choice(ODD))
    elif action == 2:
        other, name = numbers.choice(places)
        held, swapped = holder[key], other[name]
        holder[key], other[name] = deepcopy(swapped), deepcopy(held)  # one may be inside the other
    elif action == 3 and isinstance(holder[key], list):
        holder[key] = holder[key] * 2
    elif action == 4 and isinstance(holder[key], list):
        holder[key] = holder[key][: numbers.randrange(len(holder[key]) + 1)]
    elif action == 5 and isinstance(holder[key], list) and holder[key]:
        holder[key] = [*holder[key]]
        holder[key][numbers.randrange(len(holder[key]))] = deepcopy(numbers.choice(ODD))
    elif action == 6 and isinstance(holder, dict):
        holder[f"no_{key}"] = holder.pop(key)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every value inside a document, as its holder and its key."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _documents(recording: Recording) -> Iterator[Any]:
    """The response, or the chunks of a stream up to its end."""
    streams = recording.content_type.startswith("text/event-stream")
    for line in recording.payload.splitlines() if streams else [recording.payload]:
        if line == b"data: [DONE]":
            return
        with suppress(ValueError, RecursionError):
            yield json.loads(line.removeprefix(b"data: ").decode())


def _counted(documents: list[Any]) -> int | None:
    """What the engine says it generated, read in the plainest way: the last count of each kind."""
    count: int | None = None
    for document in documents:
        for part in document if isinstance(document, list) else [document]:
            if not isinstance(part, Mapping):
                continue
            for holder in (part.get("usage"), part.get("meta_info")):
                value = holder.get("completion_tokens") if isinstance(holder, Mapping) else None
                count = value if type(value) is int else count
            if part.get("stop") is True and type(part.get("tokens_predicted")) is int:
                count = part["tokens_predicted"]
    return count


def _named(response: Any) -> Iterator[list[Any]]:
    """The ids that the log probabilities of a whole response name, wherever an engine has them."""
    choices = response.get("choices") if isinstance(response, dict) else None
    for holder in [response, *(choices if isinstance(choices, list) else ())]:
        if not isinstance(holder, dict):
            continue
        meta, entries = holder.get("meta_info"), holder.get("logprobs")
        pairs = meta.get("output_token_logprobs") if isinstance(meta, dict) else None
        if isinstance(pairs, list):
            yield [pair[1] if isinstance(pair, list) and len(pair) > 1 else None for pair in pairs]
        for listed in (entries.get("content") if isinstance(entries, dict) else None, holder.get(_NATIVE)):
            if not isinstance(listed, list):
                continue
            named = [entry.get("token_id", entry.get("id")) if isinstance(entry, dict) else None for entry in listed]
            if any(token is not None for token in named):
                yield named


def _arrays(value: Any) -> Iterator[list[Any]]:
    if isinstance(value, list):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _arrays(inner)


def _numbers(value: Any) -> Iterator[int]:
    """The integers of a document, and those that ``token_id:N`` spells; ``True`` is none."""
    if type(value) is int:
        yield value
    elif isinstance(value, str):
        digits = value.removeprefix("token_id:")
        if digits != value and digits.isdigit():
            yield int(digits)
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _numbers(inner)
