"""What the client sees of a stream is the engine's bytes without the hidden events, wherever its chunks are cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import orjson
import pytest

from support.engine_pieces import captured
from support.made_up import FIRST, delta, usage
from token_id_capture.server.engines.vllm import VllmEngine

ASKED = {"logprobs": True, "return_token_ids": True}
SHOWN = [orjson.dumps(part) for part in (FIRST, delta([10]), delta([11], "stop"))]


def text(events: Sequence[bytes], end: bytes) -> bytes:
    return b"".join(b"data: " + event + 2 * end for event in events)


async def seen(sent: bytes, *cuts: int) -> bytes:
    pieces = [sent[start:stop] for start, stop in pairwise([0, *cuts, len(sent)]) if start < stop]
    shown, unfinished, entries, marks = await captured(VllmEngine(), ASKED, pieces)
    assert (unfinished, [entry["generation_token_ids"] for entry in entries], marks) == (False, [[10, 11]], [])
    return bytes(shown)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"], ids=["lf", "crlf", "cr"])
@pytest.mark.parametrize("last", [[b"[DONE]"], []], ids=["done", "no done"])
async def test_a_hidden_event_takes_its_own_line_end_along_and_no_others(end: bytes, last: list[bytes]) -> None:
    sent, expected = text([*SHOWN, orjson.dumps(usage(2)), *last], end), text([*SHOWN, *last], end)
    for cut in range(len(sent)):
        assert await seen(sent, cut) == expected, cut
    # After the line end of each event, and within it.
    places = [place for place in range(1, len(sent)) if sent[place - 1 : place] in (b"\r", b"\n")]
    assert await seen(sent, *places) == expected
    assert await seen(sent, *range(1, len(sent))) == expected
    for first, second in pairwise(places):
        assert await seen(sent, first, second) == expected
