"""The adapters for trainers: pure functions from rows to each trainer's fields."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from token_id_capture.integrations import areal, nemo_rl, openrlhf, prime_rl, skyrl, slime, tinker, trl, verl
from token_id_capture.integrations.rows import Row
from token_id_capture.tokens import LogProbs, TokenIds

ROW: dict[str, Any] = {
    "rollout_id": "17-0",
    "_ng_task_index": 17,
    "_ng_rollout_index": 0,
    "sequence": 0,
    "sequences": 1,
    "token_ids": [1, 2, 10, 11, 5, 12],
    "loss_mask": [0, 0, 1, 1, 0, 1],
    "log_probs": [0.0, 0.0, -0.1, -0.7, 0.0, -0.2],
    "mask_sample": False,
    "mask_reason": None,
    "reward": 1,
    "finish_reason": "stop",
    "truncated": False,
    "prompt_length": 2,
    "turn_spans": [
        {"start": 2, "end": 4, "model_call_id": "call-0", "response_id": "resp-0", "model": "m"},
        {"start": 5, "end": 6, "model_call_id": "call-1", "response_id": "resp-1", "model": "m"},
    ],
    "sampling": {"temperature": 0.7},
    "weight_versions": [{"start": 2, "end": 4, "version": "3"}, {"start": 5, "end": 6, "version": "4"}],
}
MASKED = {**ROW, "token_ids": [], "loss_mask": [], "log_probs": [], "mask_sample": True, "mask_reason": "call_lost"}

SUMS: dict[str, Callable[[dict[str, Any]], tuple[float, int]]] = {
    "trl": lambda row: _flat(trl.rollout_outputs([row]), "logprobs", "env_mask"),
    "trl async": lambda row: _sum(trl.rollout_sample(row, 1.0), "old_log_probs", "completion_mask"),
    "verl": lambda row: _sum(verl.agent_loop_output(row), "response_logprobs", "response_mask"),
    "skyrl": lambda row: _flat(skyrl.generator_output([row]), "rollout_logprobs", "loss_masks"),
    "prime_rl": lambda row: _sum(prime_rl.training_sample(row, 1.0, "env"), "logprobs", "mask"),
    "slime": lambda row: _sum(slime.sample(row), "rollout_log_probs", "loss_mask"),
    "tinker": lambda row: _sum(tinker.datum(row, 1.0)["loss_fn_inputs"], "logprobs", "mask"),
    "areal": lambda row: _flat(areal.tensors(row), "logprobs", "loss_mask"),
    "openrlhf": lambda row: _ranges(openrlhf.experience(row)),
    "nemo_rl": lambda row: _turns(nemo_rl.datum(row)),
}
"""What each trainer would train on: the sum of the log probabilities with loss, and their number."""


def _sum(fields: dict[str, Any], values: str, mask: str) -> tuple[float, int]:
    assert len(fields[values]) == len(fields[mask])
    chosen = [value for value, one in zip(fields[values], fields[mask], strict=True) if one]
    return math.fsum(chosen), len(chosen)


def _flat(fields: dict[str, Any], values: str, mask: str) -> tuple[float, int]:
    return _sum({values: fields[values][0], mask: fields[mask][0]}, values, mask)


def _ranges(fields: dict[str, Any]) -> tuple[float, int]:
    chosen = [fields["rollout_log_probs"][at] for start, end in fields["action_ranges"] for at in range(start, end)]
    return math.fsum(chosen), len(chosen)


def _turns(fields: dict[str, Any]) -> tuple[float, int]:
    if not fields["loss_multiplier"]:
        return 0.0, 0
    chosen = [value for turn in fields["message_log"] for value in turn.get("generation_logprobs", [])]
    return math.fsum(chosen), len(chosen)


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Any]:
    # As a real row is: it begins with a prompt, and has at least one sampled token.
    mask = [0, *draw(st.lists(st.integers(0, 1), max_size=20)), 1, *draw(st.lists(st.just(0), max_size=3))]
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=len(mask), max_size=len(mask)))
    probabilities = st.floats(-20, 0, allow_nan=False)
    log_probs = [draw(probabilities) if one else 0.0 for one in mask]
    return {"rollout_id": "r", "token_ids": tokens, "loss_mask": mask, "log_probs": log_probs}


@pytest.mark.parametrize("trainer", SUMS)
@given(row=rows())
def test_each_trainer_gets_every_sampled_token_once_with_its_own_log_probability(
    trainer: str, row: dict[str, Any]
) -> None:
    found, count = SUMS[trainer](row)
    assert count == sum(row["loss_mask"])
    assert found == pytest.approx(math.fsum(row["log_probs"]))


@pytest.mark.parametrize("trainer", SUMS)
@pytest.mark.parametrize(
    "masked",
    [MASKED, {**ROW, "mask_sample": True}, {**MASKED, "token_ids": [0], "loss_mask": [0], "log_probs": [0.0]}],
    ids=["empty", "with tokens", "placeholder"],
)
def test_a_masked_row_loads_and_has_no_loss(trainer: str, masked: dict[str, Any]) -> None:
    assert SUMS[trainer](masked) == (0.0, 0)


def test_no_trainer_gets_an_empty_prompt_or_response_for_a_masked_row() -> None:
    outputs = trl.rollout_outputs([MASKED])
    assert (len(outputs["prompt_ids"][0]), len(outputs["completion_ids"][0])) == (1, 1)
    assert any(turn["role"] == "assistant" for turn in nemo_rl.datum(MASKED)["message_log"])
    assert slime.sample(MASKED)["status"] == "aborted"
    assert slime.sample(MASKED)["reward"] == 1.0


@given(row=rows())
def test_turns_of_nemo_rl_join_to_the_sequence(row: dict[str, Any]) -> None:
    turns = nemo_rl.datum(row)["message_log"]
    assert [token for turn in turns for token in turn["token_ids"]] == row["token_ids"]
    assert all(first["role"] != second["role"] for first, second in pairwise(turns))


@given(row=rows())
def test_a_datum_of_tinker_is_shifted_by_one(row: dict[str, Any]) -> None:
    datum = tinker.datum(row, 2.0)
    assert datum["model_input"] == row["token_ids"][:-1]
    assert datum["loss_fn_inputs"]["target_tokens"] == row["token_ids"][1:]
    assert datum["loss_fn_inputs"]["advantages"] == [2.0 * one for one in row["loss_mask"][1:]]


def test_versions_temperatures_and_turns_come_from_the_columns() -> None:
    assert areal.tensors(ROW)["versions"] == [[-1, -1, 3, 3, -1, 4]]
    assert trl.rollout_sample(ROW, 1.0)["model_version"] == 4
    assert slime.sample(ROW)["weight_versions"] == ["3", "4"]
    assert set(prime_rl.training_sample(ROW, 1.0, "math")["temperatures"]) == {0.7}
    assert verl.agent_loop_output(ROW)["num_turns"] == 2
    assert openrlhf.experience(ROW)["action_ranges"] == [(2, 4), (5, 6)]


def test_rows_of_one_rollout_share_a_number_in_slime() -> None:
    first, second = slime.sample({**ROW, "sequence": 0}), slime.sample({**ROW, "sequence": 1})
    assert first["rollout_id"] == second["rollout_id"] != slime.sample({**ROW, "rollout_id": "18-0"})["rollout_id"]
    assert (first["metadata"]["rollout_id"], first["remove_sample"]) == ("17-0", False)
    assert 0 <= first["rollout_id"] < 2**53


def test_rows_of_one_rollout_are_steps_of_one_trajectory() -> None:
    second = {**ROW, "sequence": 1}
    other = {**ROW, "rollout_id": "18-1", "_ng_task_index": 18, "_ng_rollout_index": 1, "finish_reason": "length"}
    found = skyrl.generator_output([ROW, second, {**other, "truncated": None}])
    assert found["trajectory_ids"] == [("17", 0), ("17", 0), ("18", 1)]
    assert found["is_last_step"] == [False, True, True]
    assert found["stop_reasons"] == ["stop", "stop", "length"]


def test_packed_sequences_are_taken_as_well() -> None:
    packed = {**ROW, "token_ids": TokenIds(ROW["token_ids"]), "log_probs": LogProbs(ROW["log_probs"])}
    assert trl.rollout_outputs([packed]) == trl.rollout_outputs([ROW])
    assert all(type(token) is int for token in Row.of(packed).token_ids)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({**ROW, "loss_mask": [1]}, "rollout '17-0' has 6 token ids, 1 loss mask values and 6 log probabilities"),
        ({"rollout_id": "9-0"}, "rollout '9-0' has no token_ids and no loss_mask and no log_probs: write it as a traj"),
    ],
)
def test_a_malformed_row_is_named(broken: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verl.agent_loop_output(broken)
