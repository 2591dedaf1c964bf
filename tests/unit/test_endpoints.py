"""Which requests are captured, which are harmless, and which could generate unseen."""

from __future__ import annotations

from typing import Any

import pytest

from token_id_capture.server.engines.base import Endpoint
from token_id_capture.server.wire.endpoints import Kind, expected_choices, kind_of


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions", "/v1/completions", "/completions"])
def test_generations_are_captured_when_they_are_posted(path: str) -> None:
    assert kind_of("POST", path) is Kind.CAPTURED
    assert {kind_of(method, path) for method in ("GET", "HEAD", "OPTIONS")} == {Kind.HARMLESS}


@pytest.mark.parametrize(
    "path",
    [
        "/tokenize",
        "/detokenize",
        "/v1/embeddings",
        "/v1/messages/count_tokens",
        "/v1/chat/completions/render",
        "/v1/chat/completions/derender",
        "/apply-template",
        "/v1/rerank",
        "/score",
        "/pooling",
        "/classify",
        "/v1/responses/resp_1/cancel",
        "/abort_requests",
        "/abort_request",
        "/update_weights",
        "/release_memory_occupation",
        "/lora-adapters",
        "/v1beta/models/gemini-2.5-pro:countTokens",
    ],
)
def test_what_generates_nothing_is_harmless(path: str) -> None:
    assert kind_of("POST", path) is Kind.HARMLESS


@pytest.mark.parametrize(
    "path",
    [
        "/v1/responses",
        "/v1/messages",
        "/v1/chat/completions/",
        "/v1/v1/chat/completions",
        "/anything",
        "/",
        "/render/x",
        "/v1beta/models/gemini-2.5-pro:generateContent",
        "/v1/chat/completions#/tokenize",
        "/v1/chat/completions?/tokenize",
        "/v1/chat/completions;/tokenize",
        "/v1/chat/completions\\/tokenize",
        "/v1/tokenize/../chat/completions/./tokenize",
    ],
)
def test_what_is_not_known_to_be_harmless_could_generate(path: str) -> None:
    assert {kind_of(method, path) for method in ("POST", "PUT", "PATCH")} == {Kind.UNCAPTURED}


@pytest.mark.parametrize(
    ("endpoint", "body", "choices"),
    [
        (Endpoint.CHAT, {}, 1),
        (Endpoint.CHAT, {"n": 3}, 3),
        (Endpoint.CHAT, {"n": None}, 1),
        (Endpoint.CHAT, {"n": True, "prompt": ["a", "b"]}, 1),
        (Endpoint.COMPLETIONS, {"prompt": "a", "n": 2}, 2),
        (Endpoint.COMPLETIONS, {"prompt": ["a", "b"], "n": 2}, 4),
        (Endpoint.COMPLETIONS, {"prompt": [1, 2, 3]}, 1),
        (Endpoint.COMPLETIONS, {"prompt": [[1, 2], [3]]}, 2),
        (Endpoint.COMPLETIONS, {"prompt": []}, 1),
    ],
)
def test_the_number_of_choices_is_known_from_the_request(
    endpoint: Endpoint, body: dict[str, Any], choices: int
) -> None:
    assert expected_choices(endpoint, body) == choices
