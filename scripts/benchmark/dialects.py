"""``scripts/bench dialects``: what translating a request and a chunk of a stream costs, in processor time."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import orjson

from token_id_capture.server.dialects.chat import ChatRequest, Dialect, TranslationOptions
from token_id_capture.server.dialects.paths import Target
from token_id_capture.server.dialects.stream import TranslatedStream
from token_id_capture.server.dialects.translate import read_json, read_request, stream_writer

_REQUEST_BYTES: Final = 50_000
_TURNS: Final = (10, 35)
_REQUEST_SECONDS: Final = 0.2e-3
_CHUNK_SECONDS: Final = 20e-6
_CHUNKS: Final = 5_000
_GROWTH: Final = 1.5
"""How much more a chunk may cost in a stream of four times the length."""


@dataclass(frozen=True)
class Measured:
    """One figure in seconds, or a ratio, and the most that it may be."""

    what: str
    value: float
    bound: float

    @property
    def holds(self) -> bool:
        return self.value <= self.bound


def main(arguments: Sequence[str]) -> int:
    """Measure and report; returns the exit code."""
    made = argparse.ArgumentParser(prog="scripts/bench dialects", description=__doc__)
    made.add_argument("--check", action="store_true", help="exit with 1 if a bound is missed")
    made.add_argument("--json", action="store_true", help="the result as JSON")
    options = made.parse_args(arguments)
    found = list(measure())
    if options.json:
        sys.stdout.write(json.dumps([asdict(one) for one in found], indent=2) + "\n")
    for one in found if not options.json else ():
        shown = f"{one.value * 1e6:9.1f} us" if one.bound < 1 else f"{one.value:9.2f} x "
        bound = f"{one.bound * 1e6:.0f} us" if one.bound < 1 else f"{one.bound:.1f} x"
        sys.stdout.write(f"{one.what:48}{shown}  (bound {bound}){'' if one.holds else '  MISSED'}\n")
    return int(options.check and not all(one.holds for one in found))


def measure() -> Iterator[Measured]:
    """The figures of each dialect."""
    for dialect in Dialect:
        for calls in _TURNS:
            raw = orjson.dumps(_requests(calls)[dialect])
            spent = _best(partial(_translate, Target(dialect, model="m"), raw))
            yield Measured(f"{dialect}: a request of {len(raw):,} bytes, {calls} calls", spent, _REQUEST_SECONDS)
        for kind in ("text", "arguments"):
            spent = _chunk_seconds(dialect, kind, _CHUNKS)
            yield Measured(f"{dialect}: a chunk of {kind}", spent, _CHUNK_SECONDS)
        longer = _chunk_seconds(dialect, "arguments", 4 * _CHUNKS)
        yield Measured(f"{dialect}: a chunk of a stream four times as long", longer / spent, _GROWTH)


def _translate(target: Target, raw: bytes) -> bytes:
    return read_request(target, read_json(raw), TranslationOptions()).encoded()


def _requests(calls: int) -> dict[Dialect, dict[str, Any]]:
    """A conversation of so many calls and their results in each dialect, of some 50 kB."""
    result = "x" * (_REQUEST_BYTES // calls - 350)
    names = [f"call-{number}" for number in range(calls)]
    arguments: dict[str, Any] = {"command": "cat notes.txt", "description": "Show notes", "timeout": 10000}
    user: dict[str, Any] = {"role": "user", "content": "Look."}
    messages, items, contents = [user], [user], [{"role": "user", "parts": [{"text": "Look."}]}]
    for name in names:
        call = {"type": "tool_use", "id": name, "name": "shell", "input": arguments}
        answer = {"type": "tool_result", "tool_use_id": name, "content": result}
        messages += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [answer]}]
        text = json.dumps(arguments)
        items += [{"type": "function_call", "call_id": name, "name": "shell", "arguments": text}]
        items += [{"type": "function_call_output", "call_id": name, "output": result}]
        asked = {"functionCall": {"id": name, "name": "shell", "args": arguments}}
        found = {"functionResponse": {"id": name, "name": "shell", "response": {"output": result}}}
        contents += [{"role": "model", "parts": [asked]}, {"role": "user", "parts": [found]}]
    return {
        Dialect.MESSAGES: {"model": "m", "max_tokens": 9, "messages": messages},
        Dialect.RESPONSES: {"model": "m", "input": items},
        Dialect.GEMINI: {"contents": contents},
    }


def _chunk_seconds(dialect: Dialect, kind: str, count: int) -> float:
    call: dict[str, Any] = {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "shell", "arguments": ""}}]}
    piece: dict[str, Any] = {"content": " word"}
    if kind == "arguments":
        piece = {"tool_calls": [{"index": 0, "function": {"arguments": '"a'}}]}
    first, chunk = _frame(call if kind == "arguments" else {"role": "assistant"}), _frame(piece)

    def run() -> None:
        stream = TranslatedStream(stream_writer(ChatRequest(dialect, {}, "m"), "id", as_events=True), "id")
        stream.feed(first)
        for _ in range(count):
            stream.feed(chunk)

    return _best(run, 5) / count


def _frame(delta: dict[str, Any]) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": None}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def _best(work: Callable[[], object], times: int = 50) -> float:
    """The least processor time of several runs: what else the machine does only adds to it."""
    spent = []
    for _ in range(times):
        begun = time.process_time()
        work()
        spent.append(time.process_time() - begun)
    return min(spent)
