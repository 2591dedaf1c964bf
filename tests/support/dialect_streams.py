"""What a stream of each dialect says, read by the grammar that its clients hold it to, and by its SDK's types."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from token_id_capture.server.dialects.chat import ChatRequest, ClientTool, Dialect
from token_id_capture.server.dialects.seal import opened
from token_id_capture.server.text.sse import EventParser

MODEL = "client-model"


@dataclass
class Said:
    """What a response says; ``calls`` are (id, name, arguments)."""

    reasoning: str = ""
    text: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    stop: Any = None
    usage: Any = None
    error: Any = None

    def as_values(self) -> Said:
        """The same with arguments as JSON values, which is all that a whole response may keep of them."""
        calls = [(call_id, name, json.dumps(_object(arguments))) for call_id, name, arguments in self.calls]
        return Said(self.reasoning, self.text, calls, self.stop, self.usage, self.error)


def request_of(dialect: Dialect) -> ChatRequest:
    """A request whose responses hide nothing."""
    tools = {"patch": ClientTool("patch", custom=True), "team__ask": ClientTool("ask", "team")}
    return ChatRequest(dialect, {}, MODEL, streams=True, tools=tools)


def events_of(body: bytes) -> list[dict[str, Any]]:
    """The data of the events. An event's name is its data's type where it has one."""
    parser = EventParser()
    events = parser.feed(body)
    assert parser.rest == b""
    found: list[dict[str, Any]] = []
    for event in events:
        assert event.data is not None
        data = json.loads(event.data)
        assert not event.name or event.name.decode() == data["type"]
        found.append(data)
    return found


def said_in_stream(dialect: Dialect, body: bytes) -> Said:
    """Read a whole stream, which must keep its dialect's grammar."""
    events = events_of(body)
    read = {Dialect.MESSAGES: _messages, Dialect.RESPONSES: _responses, Dialect.GEMINI: _gemini}[dialect]
    return read(events)


def said_in_response(dialect: Dialect, response: dict[str, Any]) -> Said:
    """Read a whole response."""
    if dialect is Dialect.MESSAGES:
        _validator("message").validate_python(response)
        said = Said(stop=(response["stop_reason"], response["stop_sequence"]), usage=response["usage"])
        for block in response["content"]:
            _take_message_block(said, block, None)
        return said
    if dialect is Dialect.RESPONSES:
        _validator("response").validate_python(response)
        return _said_by_items(response)
    return _gemini([response])


def _messages(events: list[dict[str, Any]]) -> Said:
    validator = _validator("message-event")
    said, index, state = Said(), 0, "start"
    current: dict[str, Any] = {}
    pieces: list[dict[str, Any]] = []
    for event in events:
        assert state != "ended", f"{event} after the end"
        kind = event["type"]
        if kind == "error":
            said.error, state = event["error"], "ended"
            continue
        validator.validate_python(event)
        if kind == "message_start":
            assert (state, event["message"]["content"]) == ("start", [])
            state = "between"
        elif kind == "content_block_start":
            assert (state, event["index"]) == ("between", index)
            current, state, pieces = event["content_block"], "block", []
        elif kind == "content_block_delta":
            assert (state, event["index"]) == ("block", index)
            pieces.append(event["delta"])
        elif kind == "content_block_stop":
            assert (state, event["index"]) == ("block", index)
            index, state = index + 1, "between"
            _take_message_block(said, current, pieces)
        elif kind == "message_delta":
            assert (state, index > 0) == ("between", True)
            said.stop = event["delta"]["stop_reason"], event["delta"]["stop_sequence"]
            said.usage, state = event["usage"], "delta"
        else:
            assert (kind, state) == ("message_stop", "delta")
            state = "ended"
    assert state == "ended"
    return said


def _take_message_block(said: Said, block: dict[str, Any], deltas: list[dict[str, Any]] | None) -> None:
    kinds = {
        "thinking": {"thinking_delta", "signature_delta"},
        "text": {"text_delta"},
        "tool_use": {"input_json_delta"},
    }
    kind = block["type"]
    assert {delta["type"] for delta in deltas or ()} <= kinds[kind]
    if kind == "thinking":
        text = block["thinking"] + "".join(delta.get("thinking", "") for delta in deltas or ())
        signature = block["signature"] + "".join(delta.get("signature", "") for delta in deltas or ())
        assert opened(signature) == text
        said.reasoning += text
    elif kind == "text":
        said.text += block["text"] + "".join(delta["text"] for delta in deltas or ())
    else:
        streamed = None if deltas is None else "".join(delta["partial_json"] for delta in deltas)
        arguments = json.dumps(block["input"]) if streamed is None else streamed
        said.calls.append((block["id"], block["name"], arguments))


def _responses(events: list[dict[str, Any]]) -> Said:
    validator = _validator("response-event")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    terminal = events[-1]
    item: dict[str, Any] | None = None
    done: list[dict[str, Any]] = []
    deltas: list[str] = []
    for event in events:
        validator.validate_python(event)
    for event in events[2:-1]:
        kind = event["type"]
        assert event["output_index"] == len(done)
        if kind == "response.output_item.added":
            assert item is None
            item, deltas = event["item"], []
            continue
        assert item is not None
        if kind == "response.output_item.done":
            assert event["item"]["id"] == item["id"]
            done.append(event["item"])
            item = None
            continue
        assert event["item_id"] == item["id"]
        if kind.endswith(".delta"):
            deltas.append(event["delta"])
        elif kind.endswith((".done",)) and "part" not in kind:
            assert "".join(deltas) == event.get("text", event.get("arguments", event.get("input")))
    if terminal["type"] == "response.failed":
        return Said(error=terminal["response"]["error"])
    assert (item, terminal["type"]) == (None, f"response.{terminal['response']['status']}")
    assert terminal["response"]["output"] == done
    return _said_by_items(terminal["response"])


def _said_by_items(response: dict[str, Any]) -> Said:
    said = Said(stop=(response["status"], response["incomplete_details"]), usage=response["usage"])
    for item in response["output"]:
        if item["type"] == "reasoning":
            text = "".join(part["text"] for part in item["content"])
            assert opened(item["encrypted_content"]) == text
            said.reasoning += text
        elif item["type"] == "message":
            said.text += "".join(part["text"] for part in item["content"])
        elif item["type"] == "custom_tool_call":
            said.calls.append((item["call_id"], item["name"], item["input"]))
        else:
            said.calls.append((item["call_id"], item.get("namespace", "") + item["name"], item["arguments"]))
    return said


def _gemini(responses: list[dict[str, Any]]) -> Said:
    validator = _validator("gemini")
    said, sealed = Said(), None
    for position, response in enumerate(responses):
        if "error" in response:
            assert position == len(responses) - 1
            said.error = response["error"]
            return said
        validator.validate_python(response)
        (candidate,) = response["candidates"]
        assert ("finishReason" in candidate) == (position == len(responses) - 1)
        for part in candidate["content"]["parts"]:
            sealed = part.get("thoughtSignature", sealed)
            if "functionCall" in part:
                call = part["functionCall"]
                said.calls.append((call["id"], call["name"], json.dumps(call["args"])))
            elif part.get("thought"):
                said.reasoning += part["text"]
            else:
                said.text += part["text"]
    assert opened(sealed) == (said.reasoning or None)
    said.stop, said.usage = responses[-1]["candidates"][0]["finishReason"], responses[-1]["usageMetadata"]
    return said


def _object(arguments: str) -> Any:
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


@cache
def _validator(name: str) -> TypeAdapter[Any]:
    """The type of an official SDK; loading one takes seconds."""
    if name.startswith("message"):
        import anthropic.types as anthropic

        return TypeAdapter(anthropic.Message if name == "message" else anthropic.RawMessageStreamEvent)
    if name.startswith("response"):
        import openai.types.responses as responses

        return TypeAdapter(responses.Response if name == "response" else responses.ResponseStreamEvent)
    from google.genai.types import GenerateContentResponse

    return TypeAdapter(GenerateContentResponse)
