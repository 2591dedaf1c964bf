"""Images in a prompt: their placeholders are alike, so the digests of the images tell calls apart."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from support.call_trees import call
from support.spoken import Spoken
from support.ways import WAYS, replayed
from token_id_capture.builder import prefix_merging
from token_id_capture.protocols import TokenCaptureSnapshot
from token_id_capture.rebuild import build_snapshot
from token_id_capture.records import TokenEntry, media_of
from token_id_capture.server.wire.request import digests_of, media_parts

CAT = {"type": "image_url", "image_url": {"url": "data:image/png;base64,Y2F0"}}
DOG = {"type": "image_url", "image_url": {"url": "data:image/png;base64,ZG9n"}}
TEXT = {"type": "text", "text": "an image of a file"}


def seen(name: str, prompt: list[int], generation: list[int], *media: str) -> TokenEntry:
    return call(name, prompt, generation, None, **({"media_digests": list(media)} if media else {}))


def test_the_same_ids_with_other_images_are_neither_copies_nor_retries() -> None:
    output = prefix_merging(
        [seen("a", [1, 9], [5], "cat"), seen("b", [1, 9], [5], "dog"), seen("c", [1, 9], [6], "cow")]
    )
    assert not output.notes.copied_calls
    assert output.notes.unresolved_retries == []
    assert output.notes.chains == 3


def test_the_same_ids_with_the_same_image_are_copies() -> None:
    output = prefix_merging([seen("a", [1, 9], [5], "cat"), seen("b", [1, 9], [5], "cat")])
    assert output.notes.chains == 1


@pytest.mark.parametrize("others", [0, 20])
def test_a_call_continues_the_one_that_saw_its_images(others: int) -> None:
    calls = [seen("a", [1, 9], [5], "cat"), seen("b", [1, 9], [5], "dog")]
    calls += [seen(f"other-{number}", [1, 9], [5], f"bird-{number}") for number in range(others)]
    calls.append(seen("c", [1, 9, 5, 9], [6], "dog", "cow"))
    chains = [[link.entry.model_call_id for link in chain.links] for chain in prefix_merging(calls).chains]
    assert ["b", "c"] in chains
    assert ["a"] in chains


def test_a_prompt_without_the_image_continues_nobody_who_saw_it() -> None:
    chains = prefix_merging([seen("a", [1, 9], [5], "cat"), seen("b", [1, 9, 5, 7], [6])]).chains
    assert len(chains) == 2


@pytest.mark.parametrize("media", [(), ("cat",)])
def test_a_row_says_whether_its_tokens_stand_for_images(media: tuple[str, ...]) -> None:
    snapshot = TokenCaptureSnapshot("r", (seen("a", [1, 9], [5], *media),), False, "s", 1)
    [row] = build_snapshot(snapshot).training_rows()
    assert row.as_dict()["multimodal"] is bool(media)


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        ({"messages": [{"role": "user", "content": "an image"}]}, 0),
        ({"messages": [{"role": "user", "content": [TEXT]}]}, 0),
        ({"messages": [{"role": "user", "content": [TEXT, CAT]}, {"role": "tool", "content": [DOG]}]}, 2),
        ({"messages": [{"role": "user", "content": [{"image_url": "https://example.com/cat.png"}]}]}, 1),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "a"}}]}]}, 1),
        ({"input_ids": [1, 2], "image_data": "Y2F0"}, 1),
        ({"input_ids": [1, 2], "image_data": None}, 0),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["Y2F0"]}}, 1),
        ({"messages": "none", "prompt": 5}, 0),
    ],
)
def test_parts_that_are_no_text_are_found(body: dict[str, Any], parts: int) -> None:
    assert len(digests_of(media_parts(body))) == parts


def test_a_digest_is_of_the_content_and_not_of_the_order_of_keys() -> None:
    turned = dict(reversed(CAT.items()))
    assert digests_of([CAT]) == digests_of([turned]) != digests_of([DOG])


async def test_a_captured_call_keeps_the_digests_of_its_images() -> None:
    way = WAYS["vllm-chat"]
    messages = [{"role": "user", "content": [TEXT, CAT, DOG]}]
    done = await replayed(way, Spoken(), request=orjson.dumps({**way.request, "messages": messages}))
    (entry,) = done.entries
    assert media_of(entry) == tuple(digests_of([CAT, DOG]))
