"""Weights that change while a response comes: spans of what each version sampled, never the first or the last one."""

from __future__ import annotations

from typing import Any

import pytest

from token_id_capture.server.engines import ENGINES
from token_id_capture.server.engines.base import ChoiceTokens, Endpoint, Engine

OLD = {"version": "v7", "start": 0, "end": 2}
NEW = {"version": "v8", "start": 2, "end": 4}


def collected(engine: str, endpoint: Endpoint, parts: list[dict[str, Any]]) -> ChoiceTokens:
    adapter: Engine = ENGINES[engine]()
    reader = adapter.reader(endpoint, {"stream": True, "model": "m"})
    for part in parts:
        reader.add(part)
    return reader.tokens()[0]


def chunk(token: int, **more: Any) -> dict[str, Any]:
    content = [{"token": f"token_id:{token}", "logprob": -0.5}]
    return {"choices": [{"index": 0, "delta": {}, "token_ids": [token], "logprobs": {"content": content}, **more}]}


@pytest.mark.parametrize(
    "told",
    [
        [[OLD], None, [OLD, NEW], None],
        [None, None, None, [OLD, NEW]],
        [[{**OLD, "end": 1}], [OLD], [OLD, {**NEW, "end": 3}], [OLD, NEW]],
        [[OLD], None, [NEW], None],
    ],
    ids=["growing", "last", "in every chunk", "only what is new"],
)
def test_spans_of_a_stream_are_those_of_the_whole_response(told: list[Any]) -> None:
    parts = [chunk(10 + n, **({} if spans is None else {"weight_versions": spans})) for n, spans in enumerate(told)]
    tokens = collected("vllm", Endpoint.CHAT, parts)
    assert (tokens.weight_version, tokens.weight_versions) == (None, [OLD, NEW])


@pytest.mark.parametrize(
    ("versions", "version", "spans"),
    [
        (["v7", "v7", "v8", "v8"], None, [OLD, NEW]),
        (["v7", None, "v8", None], None, [OLD, {**NEW, "end": 3}]),
        (["v7", "v7", "v7", "v7"], "v7", None),
        ([None, None, None, "v8"], "v8", None),
        (["v7", "v8", "v7", "v7"], None, None),
    ],
)
def test_a_version_in_each_chunk_becomes_spans(
    versions: list[str | None], version: str | None, spans: list[Any] | None
) -> None:
    parts = [
        {
            "choices": [
                {
                    "index": 0,
                    "delta": {},
                    "response_token_ids": [10 + n],
                    "meta_info": {"weight_version": name, "output_token_logprobs": [[-0.5, 10 + n, None]]},
                }
            ]
        }
        for n, name in enumerate(versions)
    ]
    tokens = collected("sglang", Endpoint.CHAT, parts)
    assert tokens.weight_version == version
    if versions[2] == "v7" and version is None:
        assert [span["version"] for span in tokens.weight_versions or ()] == ["v7", "v8", "v7"]
    else:
        assert tokens.weight_versions == spans
