"""A client sees exactly what it would have seen without the gateway: what was added for it is hidden, nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest

from support.spoken import Spoken
from support.ways import WAYS, replayed


async def shown(name: str, payload: dict[str, Any], asked: dict[str, Any], engine: str | None = None) -> dict[str, Any]:
    """What the client gets of this response."""
    way = WAYS[name]
    way = replace(way, engine=way.engine if engine is None else engine)
    recording = replace(way.recording(Spoken()), payload=orjson.dumps(payload))
    done = await replayed(way, recording=recording, request=orjson.dumps({**way.request, **asked}))
    assert len(done.entries) == 1, done.marks
    response: dict[str, Any] = orjson.loads(done.response.body)
    return response


@pytest.mark.parametrize(("asked", "tokens"), [(None, []), (False, []), (True, Spoken().ids)])
async def test_llama_servers_completion_has_the_tokens_that_were_asked_for(asked: bool | None, tokens: Any) -> None:
    payload = WAYS["llama-native"].response(Spoken())
    visible = await shown("llama-native", payload, {} if asked is None else {"return_tokens": asked})
    assert visible["tokens"] == tokens
    assert "completion_probabilities" not in visible


@pytest.mark.parametrize("asked", [False, True])
async def test_what_llama_server_repeats_in_verbose_is_hidden_too(asked: bool) -> None:
    native = WAYS["llama-native"].response(Spoken())
    payload = {**WAYS["llama-chat"].response(Spoken()), "__verbose": native}
    visible = await shown("llama-chat", payload, {"logprobs": True} if asked else {})
    assert ("completion_probabilities" in visible["__verbose"]) == asked
    assert visible["__verbose"]["content"] == native["content"]


@pytest.mark.parametrize(("asked", "hidden"), [({}, True), ({"logprobs": None}, True), ({"logprobs": 0}, False)])
async def test_log_probabilities_of_an_unknown_engine_are_hidden_unless_asked_for(
    asked: dict[str, Any], hidden: bool
) -> None:
    payload = WAYS["vllm-completion"].response(Spoken())
    visible = await shown("vllm-completion", payload, asked, "auto")
    assert (visible["choices"][0]["logprobs"] is None) == hidden
    assert visible["choices"][0]["token_ids"] is None
