"""What real harnesses restate is recognised by the chains of hashes, and what they made up is not."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import orjson

from support import harness
from support.dialect_golden import FOLDER, Recorded, recorded
from token_id_capture.server.continuity.canonical import read_history

Message = dict[str, Any]


class Exchange(NamedTuple):
    """A chat that a harness asked for, and the engine's answer; None if that did not end."""

    chat: dict[str, Any]
    answer: Message | None


def of_chats() -> Iterator[tuple[str, list[Exchange]]]:
    """OpenCode's scenarios in chat completions."""
    for scenario in sorted(path.name for path in harness.FOLDER.iterdir()):
        calls = harness.exchanges(scenario)
        yield f"opencode/{scenario}", [Exchange(orjson.loads(call.body), streamed(call.payload)) for call in calls]


def streamed(payload: bytes) -> Message | None:
    """The message of a stream of chunks; None if it broke off."""
    message: Message = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    chunks = [json.loads(frame[6:]) for frame in payload.split(b"\n\n") if frame.startswith(b"data: {")]
    choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
    for delta in (choice["delta"] for choice in choices):
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls") or ():
            if "id" in call:
                message["tool_calls"].append({"id": call["id"], "function": {**call["function"]}})
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message if any(choice.get("finish_reason") for choice in choices) else None


def of_translated() -> Iterator[tuple[str, list[Exchange]]]:
    """The scenarios in Messages and Responses, as the chats that they are translated to."""
    requests = {request.name: request for request in recorded()}
    for line in gzip.decompress((FOLDER / "conversations.jsonl.gz").read_bytes()).splitlines():
        scenario = json.loads(line)
        found = [(requests[told["request"]], told["answer"]) for told in scenario["exchanges"]]
        yield scenario["name"], [Exchange(request.translated().body, said(request, told)) for request, told in found]


def said(request: Recorded, answer: Sequence[Any] | None) -> Message | None:
    """The chat message whose translation a client was shown as ``answer``."""
    if answer is None:
        return None
    if request.path == "/v1/messages":
        restated = [{"role": "user", "content": "x"}, {"role": "assistant", "content": answer}]
        body: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": restated}
    else:
        body = {"model": "m", "input": [{"role": "user", "content": "x"}, *answer]}
    message: Message = Recorded("", request.path, body).translated().body["messages"][-1]
    return message


def test_continuations_of_recorded_harnesses_are_found_and_nothing_else_is() -> None:
    found: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    scenarios = [*of_chats(), *of_translated()]
    for name, exchanges in scenarios:
        captured: dict[bytes, set[bytes]] = {}
        for chat, answer in exchanges:
            history = read_history(chat)
            known = [restated for restated in history.answers if restated.chain in captured]
            if not history.answers:
                found["first"] += 1
            elif not known:
                unknown[name] += 1
            else:
                found["continued" if known[-1] is history.answers[-1] else "a broken answer in between"] += 1
                # The stub gave every call an id of its own, which no chain knows of.
                assert known[-1].call_ids in captured[known[-1].chain], name
            if answer is not None:
                told = history.answered(answer)
                captured.setdefault(told.chain, set()).add(told.call_ids)
    assert found == {"first": 182, "continued": 85, "a broken answer in between": 8}
    # The answers that these restate broke off, or came before the recording.
    assert unknown == {
        "claude-code-2.1.197/count-tokens": 1,
        "codex-0.171.0/cut-always": 5,
        "codex-0.171.0/ended-without-completed": 1,
        "codex-0.171.0/stall-idle-3s": 2,
    }
