"""The endpoints that an unmodified NeMo Gym is configured with, as far as they do without Gym itself.

``scripts/nemo-gym`` runs Gym's conformance kit, its tests and its servers on them.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from token_id_capture import CaptureContext, TokenCaptureStore, TokenEntry, capture_tokens
from token_id_capture.config import TokenIdCaptureConfig, token_id_capture_config
from token_id_capture.errors import ConflictingEntryError, InvalidEntryError, RolloutFrozenError
from token_id_capture.integrations import nemo_gym
from token_id_capture.integrations.nemo_gym import CaptureSink
from token_id_capture.integrations.nemo_gym.entries import digest_of
from token_id_capture.sink import reset_token_sink, set_token_sink


class Entry(BaseModel):
    """A record class of somebody else's, with the fields and more."""

    model_config = ConfigDict(extra="allow")

    rollout_id: str = "1-0"
    model_call_id: str
    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    generation_log_probs: list[float]
    parent_call_id: str | None = None
    digest: str | None = None
    prompt_is_delta: bool = False


def entry(call: str, prompt: list[int], sampled: list[int], **more: Any) -> Entry:
    log_probs = [-0.5] * len(sampled)
    fields = {"prompt_token_ids": prompt, "generation_token_ids": sampled, "generation_log_probs": log_probs}
    return Entry(model_call_id=call, **fields, **more)


def gym_digest(tokens: list[int]) -> str:
    counted = b"\x01" + struct.pack(">Q", len(tokens)) + b"".join(struct.pack(">Q", token) for token in tokens)
    return hashlib.sha256(b"nemo-gym-tokens" + counted).hexdigest()


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "captures.db"


@pytest.fixture
async def sink(database: Path) -> AsyncIterator[CaptureSink]:
    sink = CaptureSink(database)
    yield sink
    await sink.close()


async def stored(database: Path) -> tuple[TokenEntry, ...]:
    async with TokenCaptureStore(database) as store:
        return await store.read_entries("1-0")


async def test_an_entry_of_any_class_is_stored_with_the_fields_that_we_do_not_know(
    sink: CaptureSink, database: Path
) -> None:
    await sink.put(entry("a", [1, 2], [3], prefix_requested=True))
    (found,) = await stored(database)
    assert found.prompt_token_ids == [1, 2]
    assert found.model_extra == {
        "parent_call_id": None, "digest": None, "prompt_is_delta": False, "prefix_requested": True
    }  # fmt: skip


async def test_the_same_entry_again_changes_nothing_and_another_under_its_id_is_refused(sink: CaptureSink) -> None:
    await sink.put(entry("a", [1, 2], [3]))
    await sink.put(entry("a", [1, 2], [3]))
    with pytest.raises(ConflictingEntryError):
        await sink.put(entry("a", [1, 2], [4]))


async def test_a_delta_record_is_laid_out_behind_its_parent(sink: CaptureSink, database: Path) -> None:
    await sink.put(entry("a", [1, 2], [3]))
    digest = gym_digest([1, 2, 3, 4, 5])
    await sink.put(entry("b", [4], [5], parent_call_id="a", prompt_is_delta=True, digest=digest))
    found = {one.model_call_id: one for one in await stored(database)}
    assert found["b"].prompt_token_ids == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"parent_call_id": "gone"}, "holds only what follows call 'gone', which is not stored"),
        ({"parent_call_id": None}, "holds only what follows call None, which is not stored"),
        ({"parent_call_id": "b"}, "holds only what follows call 'b', which is not stored"),
        ({"parent_call_id": "a", "digest": gym_digest([9])}, "do not match the digest of the record"),
    ],
)
async def test_a_delta_record_without_a_sound_parent_is_refused(
    sink: CaptureSink, database: Path, more: dict[str, Any], message: str
) -> None:
    await sink.put(entry("a", [1, 2], [3]))
    with pytest.raises(InvalidEntryError, match=message):
        await sink.put(entry("b", [4], [5], prompt_is_delta=True, **more))
    assert len(await stored(database)) == 1


async def test_flags_come_with_two_arguments(sink: CaptureSink, database: Path) -> None:
    await sink.put(entry("a", [1, 2], [3]))
    await sink.mark_incomplete("1-0", "b")
    async with TokenCaptureStore(database) as store:
        assert (await store.freeze("1-0")).incomplete


async def test_a_refusal_resolves_the_intent_once_and_not_after_the_freeze(sink: CaptureSink, database: Path) -> None:
    await sink.begin_call("1-0", "a")
    await sink.refuse_call("1-0", model_call_id="a", code="context_length")
    await sink.refuse_call("1-0", model_call_id="a", code="context_length")
    with pytest.raises(ValueError, match="refused as 'context_length', not 'other'"):
        await sink.refuse_call("1-0", model_call_id="a", code="other")
    async with TokenCaptureStore(database) as store:
        assert not (await store.freeze("1-0")).incomplete
    with pytest.raises(RolloutFrozenError):
        await sink.refuse_call("1-0", model_call_id="c", code="context_length")


async def test_many_calls_with_one_key_of_another_rollout_are_not_found(sink: CaptureSink, database: Path) -> None:
    history = {"continuation_fingerprint": "f" * 64}
    await asyncio.gather(*(sink.put(entry(f"c{n}", [1, n], [3], rollout_id="2-0", **history)) for n in range(20)))
    from token_id_capture.integrations.nemo_gym.lineage import history_of

    async with TokenCaptureStore(database) as store:
        assert await store.find_calls("1-0", [history_of("f" * 64).chain]) == []
        assert len(await store.find_calls("2-0", [history_of("f" * 64).chain])) == 20


def test_the_digest_is_the_one_of_gym() -> None:
    sequence = TokenEntry.model_validate(entry("a", [1, 2], [3]).model_dump())
    assert digest_of(sequence) == gym_digest([1, 2, 3])
    assert digest_of(sequence).startswith("bf996330")
    assert digest_of(sequence).endswith("9ff54")
    nothing = TokenEntry.model_validate(entry("a", [], []).model_dump())
    assert digest_of(nothing).startswith("2e222d36")


async def test_capture_tokens_takes_a_pydantic_model(database: Path) -> None:
    class Answer(BaseModel):
        output: list[dict[str, Any]]

    carrier = {
        "type": "message",
        "prompt_token_ids": [1],
        "generation_token_ids": [2],
        "generation_log_probs": [-0.5],
    }
    async with TokenCaptureStore(database) as store:
        token = set_token_sink(CaptureContext("1-0", "a", store))
        await capture_tokens(Answer(output=[carrier]))
        reset_token_sink(token)
        assert [one.generation_token_ids for one in await store.read_entries("1-0")] == [[2]]


def test_items_and_usage_have_gyms_meaning() -> None:
    items: list[dict[str, Any]] = [
        {"type": "reasoning"},
        {"type": "message", "generation_token_ids": [1], "prompt_token_ids": [2]},
    ]
    assert nemo_gym.strip_token_fields(items) == ([{"type": "reasoning"}, {"type": "message"}], 1)
    with pytest.raises(ValueError, match="multiple output items"):
        nemo_gym.strip_token_fields([items[1], items[1]])
    chat = {"choices": [{"message": {"content": "a"}}]}
    assert nemo_gym.response_to_output_items(chat) == [{"type": "message", "role": "assistant", "content": "a"}]
    thought = {"type": "thinking", "thinking": "hm"}
    messages = {"type": "message", "role": "assistant", "content": [thought, {"type": "text", "text": "a"}]}
    assert [item["type"] for item in nemo_gym.response_to_output_items(messages)] == ["reasoning", "message"]
    assert nemo_gym.usage([5, 9], [2, 3]) == {"input_tokens": 5, "output_tokens": 5}


def test_gyms_settings_are_accepted_and_what_is_not_done_is_refused() -> None:
    block = {"enabled": True, "sink": "a:B", "lineage_store": "a:C", "delta_records": True}
    assert token_id_capture_config({"token_id_capture": block}).enabled
    assert not token_id_capture_config(None).enabled
    with pytest.raises(ValueError, match="external_staging is not supported"):
        TokenIdCaptureConfig.model_validate({"token_id_capture": {**block, "external_staging": True}})
