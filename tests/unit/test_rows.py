"""What a row tells of its tokens beside the arrays."""

from __future__ import annotations

from typing import Any

import pytest

from token_id_capture import TokenCaptureSnapshot, TokenEntry, build_snapshot
from token_id_capture.builder.rows import SAMPLING_INTEGERS, SAMPLING_NUMBERS


def entry(call: str, prompt: list[int], sampled: list[int], **more: Any) -> TokenEntry:
    return TokenEntry(
        rollout_id="1-0",
        model_call_id=call,
        prompt_token_ids=prompt,
        generation_token_ids=sampled,
        generation_log_probs=[-0.5] * len(sampled),
        **more,
    )


def row_of(*entries: TokenEntry) -> dict[str, Any]:
    [row] = build_snapshot(TokenCaptureSnapshot("1-0", entries, False, "s", 1)).training_rows()
    return row.as_dict()


def test_answers_and_weights_are_spans_of_the_sequence() -> None:
    row = row_of(
        entry("a", [1, 2], [3, 4, 5], model="m", response_id="r-a", weight_versions=[
            {"version": "w1", "start": 0, "end": 2}, {"version": "w2", "start": 2, "end": 3}
        ]),
        entry("b", [1, 2, 3, 4, 5, 6], [7], model="m", weight_version="w3", finish_reason="length"),
    )  # fmt: skip
    assert [(span["start"], span["end"], span["model_call_id"]) for span in row["turn_spans"]] == [
        (2, 5, "a"),
        (6, 7, "b"),
    ]
    assert [tuple(span.values()) for span in row["weight_versions"]] == [(2, 4, "w1"), (4, 5, "w2"), (6, 7, "w3")]
    assert (row["prompt_length"], row["finish_reason"], row["truncated"]) == (2, "length", True)


@pytest.mark.parametrize("told", ["nonsense", [7], [{"version": "w"}], [{"version": "w", "start": 5, "end": 9}]])
def test_spans_of_weights_that_make_no_sense_are_left_out(told: Any) -> None:
    assert row_of(entry("a", [1], [2, 3], weight_versions=told))["weight_versions"] == []


def test_modes_that_differ_are_not_told_as_one() -> None:
    same = row_of(entry("a", [1], [2], log_probs_mode="raw"), entry("b", [1, 2, 3], [4], log_probs_mode="raw"))
    mixed = row_of(entry("a", [1], [2], log_probs_mode="raw"), entry("b", [1, 2, 3], [4]))
    assert (same["log_probs_mode"], mixed["log_probs_mode"]) == ("raw", None)


@pytest.mark.parametrize(
    ("asked", "known", "other"),
    [
        ({"temperature": 1, "top_k": 20, "seed": 7}, {"temperature": 1.0, "top_k": 20, "seed": 7}, None),
        ({"stop": ["a"], "top_p": 0.5}, {"top_p": 0.5}, '{"stop":["a"]}'),
        ({"temperature": "hot", "seed": 2**70}, {}, f'{{"temperature":"hot","seed":{2**70}}}'),
        ({"sampling_params": {"temperature": 0.5, "n": 2}}, {"temperature": 0.5}, '{"n":2}'),
        ({"sampling_params": 7}, {}, '{"sampling_params":7}'),
        ({}, {}, None),
    ],
)  # fmt: skip
def test_sampling_parameters_have_the_same_fields_in_every_row(
    asked: dict[str, Any], known: dict[str, Any], other: str | None
) -> None:
    fields = row_of(entry("a", [1], [2], sampling=asked))["sampling"]
    assert set(fields) == {*SAMPLING_NUMBERS, *SAMPLING_INTEGERS, "other"}
    assert {name: value for name, value in fields.items() if value is not None and name != "other"} == known
    assert fields["other"] == other


def test_sampling_parameters_that_nobody_told_are_not_made_up() -> None:
    assert row_of(entry("a", [1], [2]))["sampling"] is None
