"""Requests that no dialect can translate: each is refused by the name of its field, whatever is wrong with it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from support.dialect_golden import places, replaced
from support.dialect_requests import CALL, GEMINI, MESSAGES, RESPONSES, USER, gemini, messages, responses
from token_id_capture.server.dialects.chat import TranslationOptions
from token_id_capture.server.dialects.fields import InvalidRequestError, shown
from token_id_capture.server.dialects.paths import Target
from token_id_capture.server.dialects.seal import seal
from token_id_capture.server.dialects.translate import read_json, read_request


@pytest.mark.parametrize(
    ("target", "body", "field"),
    [
        (MESSAGES, {"model": 7, "messages": [USER]}, "model"),
        (MESSAGES, {"messages": [USER]}, "model"),
        (MESSAGES, {"model": "m"}, "messages"),
        (MESSAGES, messages("hi"), "messages.0"),
        (MESSAGES, {"model": "m", "messages": []}, "messages"),
        (MESSAGES, messages({"role": "tool", "content": "x"}), "messages.0.role"),
        (MESSAGES, messages({"role": "user", "content": 7}), "messages.0.content"),
        (MESSAGES, messages({"role": "user", "content": [{"type": "video"}]}), "messages.0.content.0.type"),
        (MESSAGES, messages({"role": "user", "content": [{"type": "text"}]}), "messages.0.content.0.text"),
        (MESSAGES, messages({"role": "user", "content": [{"type": "image"}]}), "messages.0.content.0.source"),
        (
            MESSAGES,
            messages({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t9"}]}),
            "messages.0.content.0.tool_use_id",
        ),
        (
            MESSAGES,
            messages({"role": "assistant", "content": [{**CALL, "input": "x"}]}),
            "messages.0.content.0.input",
        ),
        (MESSAGES, messages(system=7), "system"),
        (MESSAGES, messages(system=[{"type": "image"}]), "system.0.type"),
        (MESSAGES, messages(tools=[{"name": "a"}]), "tools.0.input_schema"),
        (MESSAGES, messages(tools=[{"type": "bash_20250124", "name": "bash"}]), "tools"),
        (MESSAGES, messages(tool_choice={"type": "tool", "name": "x"}), "tool_choice.name"),
        (MESSAGES, messages(tool_choice={"type": ["x"]}), "tool_choice.type"),
        (MESSAGES, messages(max_tokens="many"), "max_tokens"),
        (MESSAGES, messages(max_tokens=0), "max_tokens"),
        (MESSAGES, messages(max_tokens=True), "max_tokens"),
        (MESSAGES, messages(temperature="hot"), "temperature"),
        (MESSAGES, messages(stop_sequences="x"), "stop_sequences"),
        (MESSAGES, messages(stream="yes"), "stream"),
        (MESSAGES, messages(thinking="on"), "thinking"),
        (MESSAGES, messages(output_config={"format": {"type": "xml"}}), "output_config.format.type"),
        (MESSAGES, messages(mcp_servers=[{}]), "mcp_servers"),
        (RESPONSES, {"model": "m"}, "input"),
        (RESPONSES, {"model": "m", "input": []}, "input"),
        (RESPONSES, responses(previous_response_id="resp_1"), "previous_response_id"),
        (RESPONSES, responses(conversation="c"), "conversation"),
        (RESPONSES, responses(background=True), "background"),
        (RESPONSES, responses({"type": "item_reference", "id": "x"}), "input.0.type"),
        (RESPONSES, responses({"type": "computer_call"}), "input.0.type"),
        (RESPONSES, responses({"role": "user", "content": [{"type": "input_file"}]}), "input.0.content.0.type"),
        (RESPONSES, responses({"type": "function_call", "call_id": "c", "name": "x"}), "input.0.arguments"),
        (RESPONSES, responses({"type": "function_call_output", "call_id": "c", "output": "x"}), "input.0.call_id"),
        (RESPONSES, responses(tools=[{"type": "function"}]), "tools.0.name"),
        (RESPONSES, responses(tools=[{"type": "novel", "name": "x"}]), "tools.0.type"),
        (RESPONSES, responses(tool_choice="perhaps"), "tool_choice"),
        (RESPONSES, responses(include="all"), "include"),
        (RESPONSES, responses(text={"format": {"type": "json_schema"}}), "text.format.schema"),
        (GEMINI, {}, "contents"),
        (GEMINI, {"contents": []}, "contents"),
        (GEMINI, gemini({"role": "user"}), "contents.0.parts"),
        (GEMINI, gemini({"role": "robot", "parts": []}), "contents.0.role"),
        (GEMINI, gemini({"role": "user", "parts": [{"executableCode": {}}]}), "contents.0.parts.0"),
        (
            GEMINI,
            gemini({"role": "user", "parts": [{"functionResponse": {"name": "x"}}]}),
            "contents.0.parts.0.functionResponse.name",
        ),
        (GEMINI, gemini(systemInstruction="a", system_instruction="b"), "system_instruction"),
        (GEMINI, gemini(generationConfig={"candidateCount": 2}), "generationConfig.candidateCount"),
        (GEMINI, gemini(generationConfig={"temperature": "x"}), "generationConfig.temperature"),
        (
            GEMINI,
            gemini(toolConfig={"functionCallingConfig": {"mode": "NOW"}}),
            "toolConfig.functionCallingConfig.mode",
        ),
        (GEMINI, gemini(cachedContent="x"), "cachedContent"),
    ],
)
def test_bad_input_names_its_field(target: Target, body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        read_request(target, body, TranslationOptions())
    assert raised.value.field == field
    assert str(raised.value).startswith(f"{field}: ")


def test_what_is_wrong_is_shown_in_short() -> None:
    result = {"type": "tool_result", "tool_use_id": "x" * 100_000}
    with pytest.raises(InvalidRequestError) as raised:
        read_request(MESSAGES, messages({"role": "user", "content": [result]}), TranslationOptions())
    assert "'xxx" in str(raised.value)
    assert len(str(raised.value)) < 200
    for value, words in ((1, "1"), (True, "true"), (None, "null"), (0.5, "0.5"), ({}, "an object"), ([], "an array")):
        assert shown(value) == words


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"a": NaN}', b"[" * 2000, b'{"a":"\\ud800"}'])
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        read_json(raw)


@pytest.mark.parametrize("depth", [300, 900])
def test_what_is_nested_too_deeply_is_refused(depth: int) -> None:
    nested = orjson.loads(b'{"a":' * depth + b"1" + b"}" * depth)
    call = {**CALL, "input": nested}
    declared = {"functionDeclarations": [{"name": "a", "parameters": nested}]}
    for target, body in (
        (MESSAGES, messages(tools=[{"name": "a", "input_schema": nested}])),
        (
            MESSAGES,
            messages(USER, {"role": "assistant", "content": [call]}, tools=[{"name": "a", "input_schema": nested}]),
        ),
        (RESPONSES, responses(tools=[{"type": "function", "name": "a", "parameters": nested}])),
        (GEMINI, gemini(tools=[declared])),
    ):
        with pytest.raises(InvalidRequestError, match="deep"):
            read_request(target, body, TranslationOptions()).encoded()


EXAMPLES = [
    (
        MESSAGES,
        messages(
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "hi"},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}},
                ],
            },
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "x", "signature": seal("x")}, CALL]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a"}]}],
            },
            system=[{"type": "text", "text": "be"}],
            tools=[{"name": "look", "description": "d", "input_schema": {"type": "object"}, "strict": True}],
            tool_choice={"type": "tool", "name": "look", "disable_parallel_tool_use": True},
            stop_sequences=["a"],
            thinking={"type": "disabled"},
            output_config={"format": {"type": "json_schema", "schema": {}}},
            stream=True,
        ),
    ),
    (
        RESPONSES,
        responses(
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "be"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "content": []},
            {"type": "function_call", "call_id": "c1", "name": "ask", "namespace": "team", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "a"}]},
            instructions="be",
            tools=[
                {"type": "custom", "name": "p", "format": {"type": "grammar", "definition": "x"}},
                {"type": "namespace", "name": "team", "tools": [{"type": "function", "name": "ask", "parameters": {}}]},
            ],
            tool_choice={"type": "function", "name": "ask"},
            include=["reasoning.encrypted_content"],
            reasoning={"effort": "high"},
            text={"format": {"type": "json_schema", "name": "n", "schema": {}}},
            stream=True,
        ),
    ),
    (
        GEMINI,
        gemini(
            {"role": "user", "parts": [{"text": "hi"}, {"inlineData": {"mimeType": "image/png", "data": "AA"}}]},
            {"role": "model", "parts": [{"functionCall": {"id": "1", "name": "look", "args": {}}, "thought": True}]},
            {"role": "user", "parts": [{"functionResponse": {"id": "1", "name": "look", "response": {"output": "x"}}}]},
            systemInstruction={"parts": [{"text": "be"}]},
            tools=[{"functionDeclarations": [{"name": "look", "description": "d", "parameters": {"type": "OBJECT"}}]}],
            toolConfig={"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["look"]}},
            generationConfig={
                "temperature": 1,
                "maxOutputTokens": 5,
                "stopSequences": ["x"],
                "candidateCount": 1,
                "responseSchema": {"type": "OBJECT"},
                "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 0},
            },
        ),
    ),
]


@pytest.mark.parametrize(("target", "body"), EXAMPLES)
def test_any_wrong_type_anywhere_is_translated_or_refused_by_name(target: Target, body: dict[str, Any]) -> None:
    assert read_request(target, body, TranslationOptions()).encoded()
    refused: list[str] = []
    for path in places(body)[1:]:
        for other in (None, True, -1, 1.5, "x", "", [], [7], {}, {"type": "x"}, [{"type": ["x"]}], [None]):
            changed = replaced(body, path, other)
            try:
                read_request(target, changed, TranslationOptions()).encoded()
            except InvalidRequestError as error:
                refused.append(error.field)
    assert refused
    assert all(refused)
