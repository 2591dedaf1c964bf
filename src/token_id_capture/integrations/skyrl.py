"""SkyRL: a ``GeneratorOutput``, step-wise where a rollout has several rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from token_id_capture.integrations.rows import Row, read


def generator_output(rows: Iterable[Mapping[str, Any]], default_reward: float = 0.0) -> dict[str, Any]:
    """The dict of ``GeneratorOutput``, one item a row.

    ``trajectory_ids`` are pairs (instance, repetition) for SkyRL's ``TrajectoryID``, and ``is_last_step``
    is true on the last row of each rollout. ``default_reward`` stands where a record has none.

    Raises:
        ValueError: a row is malformed.
    """
    found = read(rows)
    last = {row.fields.get("rollout_id"): at for at, row in enumerate(found)}
    return {
        "prompt_token_ids": [row.token_ids[: row.prompt_length] for row in found],
        "response_ids": [row.token_ids[row.prompt_length :] for row in found],
        "loss_masks": [row.loss_mask[row.prompt_length :] for row in found],
        "rollout_logprobs": [row.log_probs[row.prompt_length :] for row in found],
        "rewards": [default_reward if row.reward is None else row.reward for row in found],
        "stop_reasons": ["length" if row.truncated else "stop" for row in found],
        "trajectory_ids": [trajectory_id(row) for row in found],
        "is_last_step": [last[row.fields.get("rollout_id")] == at for at, row in enumerate(found)],
        "rollout_metrics": None,
    }


def trajectory_id(row: Row) -> tuple[str, int]:
    """The task of a rollout and which of its repetitions it is; without indices, its id and 0."""
    task, repetition = row.fields.get("_ng_task_index"), row.fields.get("_ng_rollout_index")
    if task is None or repetition is None:
        return str(row.fields.get("rollout_id")), 0
    return str(task), int(repetition)
