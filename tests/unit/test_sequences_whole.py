"""What holds for the sequences of any rollout: each sampled token is delivered once, whatever drifted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from support.call_trees import build, call, call_trees, record
from token_id_capture.lifecycle import Sequences
from token_id_capture.records import TokenEntry


def test_retries_that_begin_with_the_same_tokens_differ_behind_them() -> None:
    retries = [call("a", [1], [2, 3, 4], finish_reason="stop"), call("b", [1], [2, 3, 5], finish_reason="stop")]
    [_, other] = build(retries, sequences=Sequences.ALL).training_rows()
    assert (other.cause, other.parent, other.parent_token) == ("retry", 0, 3)


@settings(max_examples=200, deadline=None)
@given(call_trees())
def test_each_beginning_is_named_once_and_against_an_earlier_call(entries: list[TokenEntry]) -> None:
    built = build(entries)
    assert built.output is not None
    named = [one.model_call_id for one in built.notes.divergences]
    assert len(named) == len(set(named))
    roots = [one for one in built.notes.divergences if one.parent_call_id is None]
    assert len(roots) == max(0, built.notes.roots - 1)
    time = {one.model_call_id: one.created_at for one in entries}
    assert all(time[one.closest_call_id] <= time[one.model_call_id] for one in roots)


@pytest.mark.parametrize("ids", ["abcd", "dcba", "bdac"])
def test_beginnings_of_equal_length_are_named_in_the_order_of_time(ids: str) -> None:
    calls = [call(name, [5, 6, n], [100 + n], created_at=1000.0 + n) for n, name in enumerate(ids)]
    assert [one.model_call_id for one in build(calls).notes.divergences] == list(ids[1:])


def test_thirty_two_drifting_rollouts_lose_nothing() -> None:
    for number in range(32):
        calls, rest = drifting(number, compacts=number < 2, delegates=2 <= number < 4), 0
        every = build(calls, sequences=Sequences.ALL)
        rest = sum(len(one.generation_token_ids) for one in calls)
        assert sum(sum(row.loss_mask) for row in every.training_rows()) == rest
        assert build(calls, record(id="final")).deliverable


def drifting(seed: int, *, compacts: bool, delegates: bool) -> list[TokenEntry]:
    """Text in and text out: each turn's answer comes back as other tokens."""
    system = list(range(1000, 1040))
    history, calls = [*system, 7, seed], []
    for number in range(3):
        if compacts and number == 2:
            history = [*system, 8, seed]
        answer = [2000 + 100 * number + n for n in range(20)]
        more: dict[str, Any] = {"response_id": "final"} if number == 2 else {}
        calls.append(call(f"t{number}", history, answer, created_at=float(number), **more))
        if delegates and number == 1:
            calls.append(call("sub", [3000, 3001, seed], [1, 2, 3], created_at=1.5))
        history = [*history, *answer[:5], 4000, 4001, *answer[7:], 9, number, *range(5000, 5020)]
    return calls
