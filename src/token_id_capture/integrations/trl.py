"""TRL: what a ``rollout_func`` of ``GRPOTrainer`` returns, and the samples of the asynchronous trainer.

TRL pads and shifts. A ``rollout_func`` has to return exactly one row a generation of the group, so give it
rows of ``--sequences main``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from token_id_capture.integrations.rows import Row, read


def rollout_outputs(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The result of a ``rollout_func``: lists with one item a row.

    ``prompt_ids`` and ``completion_ids`` are token ids, ``logprobs`` and ``env_mask`` belong to the
    completion; ``env_mask`` is 1 where the policy sampled. Further keys reach the reward functions.

    Raises:
        ValueError: a row is malformed.
    """
    outputs: dict[str, list[Any]] = {
        "prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": [], "reward": [], "rollout_id": []
    }  # fmt: skip
    for row in read(rows):
        start = row.prompt_length
        outputs["prompt_ids"].append(row.token_ids[:start])
        outputs["completion_ids"].append(row.token_ids[start:])
        outputs["logprobs"].append(row.log_probs[start:])
        outputs["env_mask"].append(row.loss_mask[start:])
        outputs["reward"].append(row.reward)
        outputs["rollout_id"].append(row.fields.get("rollout_id"))
    return outputs


def rollout_sample(row: Mapping[str, Any], advantage: float, group_id: int = 0) -> dict[str, Any]:
    """The fields of a ``RolloutSample`` of ``AsyncGRPOTrainer``: flat, unshifted, several a rollout allowed.

    ``model_version`` is the newest numeric weight version of the row, 0 if none is known.

    Raises:
        ValueError: the row is malformed.
    """
    read_row = Row.of(row)
    return {
        "input_ids": read_row.token_ids,
        "completion_mask": read_row.loss_mask,
        "old_log_probs": read_row.log_probs,
        "advantage": advantage,
        "model_version": max(read_row.versions(unknown=0)),
        "group_id": group_id,
    }
