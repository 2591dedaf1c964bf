"""Requests of each dialect as chat completions: golden for what harnesses send."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from support.dialect_golden import FOLDER, golden, recorded
from support.dialect_requests import CALL, GEMINI, MESSAGES, RESPONSES, USER, gemini, messages, responses
from token_id_capture.server.dialects.chat import Dialect, History, InlineSystem, TranslationOptions
from token_id_capture.server.dialects.paths import Target, dialect_of, target_of
from token_id_capture.server.dialects.seal import opened, seal
from token_id_capture.server.dialects.translate import read_request


def chat(target: Target, body: dict[str, Any], options: TranslationOptions | None = None) -> dict[str, Any]:
    return read_request(target, body, options or TranslationOptions()).body


def test_recorded_requests_are_translated_as_before() -> None:
    kept = json.loads((FOLDER / "chat.json").read_bytes())
    tools = json.loads((FOLDER / "tools.json").read_bytes())
    names = set()
    for request in recorded():
        translated, own = golden(request)
        names.add(request.name)
        assert translated == kept[request.name], request.name
        assert own.items() <= tools.items()
    assert names == kept.keys()


def test_each_request_of_a_recorded_session_begins_with_the_one_before() -> None:
    main = [request.translated().body["messages"] for request in recorded() if "/main" in request.name]
    grown = [(earlier, later) for earlier, later in pairwise(main) if len(later) > len(earlier)]
    assert len(grown) > 5
    for earlier, later in grown:
        if later[0] == earlier[0]:
            assert later[: len(earlier)] == earlier


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("/v1/messages", MESSAGES),
        ("/messages", MESSAGES),
        ("/v1/v1/messages", MESSAGES),
        ("/v1/messages/", MESSAGES),
        ("/v1/responses", RESPONSES),
        ("/v1beta/models/gemini-x:generateContent", GEMINI),
        ("/v1/v1beta/models/gemini-x:generateContent", GEMINI),
        ("/v1beta/models/models%2Fx:generateContent", Target(Dialect.GEMINI, model="models/x")),
        ("/v1/chat/completions", None),
        ("/v1/v1/v1/messages", None),
        ("/v1/responses/resp_1/cancel", None),
        ("/v1beta/models", None),
        ("/v1/messages/batches", None),
    ],
)
def test_a_path_names_its_dialect(path: str, target: Target | None) -> None:
    assert target_of(path) == target
    assert target is None or dialect_of(f"/ng-rollout/r/training-token-capture{path}") is target.dialect


def test_a_tool_result_comes_before_the_text_of_its_message() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a"}, image]}
    turn = {"role": "user", "content": [{"type": "text", "text": "and now"}, result]}
    body = chat(MESSAGES, messages(USER, {"role": "assistant", "content": [CALL]}, turn))
    assert body["messages"][1:] == [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"at": "café"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "a"},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                {"type": "text", "text": "and now"},
            ],
        },
    ]


def test_a_partial_answer_is_continued() -> None:
    body = chat(MESSAGES, messages(USER, {"role": "assistant", "content": "It is"}))
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)


@pytest.mark.parametrize(
    ("mode", "roles"),
    [
        (InlineSystem.KEEP, ["system", "user", "system", "user"]),
        (InlineSystem.USER, ["system", "user", "user", "user"]),
        (InlineSystem.MERGE, ["system", "user", "user"]),
    ],
)
def test_a_system_message_behind_others_is_placed(mode: InlineSystem, roles: list[str]) -> None:
    body = messages(USER, {"role": "system", "content": "later"}, USER, system="first")
    placed = chat(MESSAGES, body, TranslationOptions(inline_system=mode))["messages"]
    assert [message["role"] for message in placed] == roles
    assert sum("later" in message["content"] for message in placed) == 1


def test_the_model_is_replaced_and_the_limit_is_capped() -> None:
    options = TranslationOptions(model="policy", max_tokens=100)
    request = read_request(MESSAGES, messages(max_tokens=32000), options)
    assert (request.body["model"], request.body["max_tokens"], request.client_model) == ("policy", 100, "m")
    assert chat(RESPONSES, responses(max_output_tokens=50), options)["max_tokens"] == 50
    assert "max_tokens" not in chat(RESPONSES, responses(), options)


def test_hosted_tools_are_left_out_and_named() -> None:
    tool = {"name": "look", "input_schema": {"type": "object"}}
    request = read_request(
        MESSAGES, messages(tools=[{"type": "web_search_20250305", "name": "web_search"}, tool]), TranslationOptions()
    )
    assert (request.left_out, len(request.body["tools"])) == (["tool web_search_20250305"], 1)


def test_custom_and_namespaced_tools_are_functions_that_find_back() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: LINE"}
    tools = [
        {"type": "custom", "name": "apply_patch", "description": "Patch.", "format": grammar},
        {"type": "namespace", "name": "team", "tools": [{"type": "function", "name": "ask", "parameters": {}}]},
    ]
    request = read_request(RESPONSES, responses(tools=tools), TranslationOptions())
    described = [tool["function"] for tool in request.body["tools"]]
    assert [(tool["name"], tool.get("description")) for tool in described] == [
        ("apply_patch", "Patch.\n\nstart: LINE"),
        ("team__ask", None),
    ]
    assert request.tools["apply_patch"].custom
    assert (request.tools["team__ask"].namespace, request.tools["team__ask"].name) == ("team", "ask")


def test_items_of_one_generation_are_one_message() -> None:
    items = [
        USER,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "re"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": seal("tried")},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{ "at":1}'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "x"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "next"}]},
        {"type": "message", "role": "assistant", "content": "bye"},
    ]
    body = chat(RESPONSES, responses(*items))
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "tool", "tool", "assistant"]
    first, last = body["messages"][1], body["messages"][4]
    assert (first["reasoning_content"], first["content"]) == ("retried", "hm")
    assert [call["function"]["arguments"] for call in first["tool_calls"]] == ['{ "at":1}', '{"input": "x"}']
    assert (last["reasoning_content"], last["content"]) == ("next", "bye")


def test_gemini_calls_and_responses_find_each_other_with_and_without_ids() -> None:
    contents = [
        {"role": "user", "parts": [{"text": "hi"}]},
        {
            "role": "model",
            "parts": [
                {"text": "thinking", "thought": True},
                {"functionCall": {"name": "look", "args": {"at": 1}}, "thoughtSignature": seal("thought so")},
                {"functionCall": {"name": "look", "args": {"at": 2}}},
                {"functionCall": {"id": "own", "name": "read", "args": {}}},
            ],
        },
        {
            "role": "user",
            "parts": [
                {"functionResponse": {"name": "look", "response": {"output": "one"}}},
                {"functionResponse": {"id": "own", "name": "read", "response": {"lines": [1]}}},
                {"functionResponse": {"name": "look", "response": {"output": "two"}}},
            ],
        },
    ]
    body = chat(GEMINI, gemini(*contents))
    answer, *results = body["messages"][1:]
    assert answer["reasoning_content"] == "thought so"
    assert [call["id"] for call in answer["tool_calls"]] == ["call_0", "call_1", "own"]
    assert [(result["tool_call_id"], result["content"]) for result in results] == [
        ("call_0", "one"),
        ("own", '{"lines": [1]}'),
        ("call_1", "two"),
    ]


def test_openapi_types_are_written_as_json_schema() -> None:
    declared = {
        "name": "look",
        "parameters": {"type": "OBJECT", "properties": {"type": {"type": "ARRAY", "items": {"type": "STRING"}}}},
    }
    body = chat(GEMINI, gemini(tools=[{"functionDeclarations": [declared]}, {"googleSearch": {}}]))
    assert body["tools"][0]["function"]["parameters"] == {
        "type": "object",
        "properties": {"type": {"type": "array", "items": {"type": "string"}}},
    }


def test_a_seal_is_opened_only_if_it_is_ours_and_wanted() -> None:
    thought = {"type": "thinking", "thinking": "shortened", "signature": seal("whole")}
    body = messages(USER, {"role": "assistant", "content": [thought]}, USER)
    assert chat(MESSAGES, body)["messages"][1]["reasoning_content"] == "whole"
    off = TranslationOptions(history=History.OFF)
    assert chat(MESSAGES, body, off)["messages"][1]["reasoning_content"] == "shortened"
    assert [opened(value) for value in ("", "no base64!", "ZW5jcnlwdGVkLXN0dWI=", None, 7)] == [None] * 5


@pytest.mark.parametrize("target", [MESSAGES, RESPONSES, GEMINI])
def test_ten_thousand_blocks_are_translated(target: Target) -> None:
    if target is MESSAGES:
        body = messages({"role": "user", "content": [{"type": "text", "text": "x"}] * 10_000})
    elif target is RESPONSES:
        body = responses({"role": "user", "content": [{"type": "input_text", "text": "x"}] * 10_000})
    else:
        body = gemini({"role": "user", "parts": [{"text": "x"}] * 10_000})
    assert len(chat(target, body)["messages"][0]["content"]) == 10_000
