"""AReaL: the tensors of one interaction, as nested lists of shape [1, T]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from token_id_capture.integrations.rows import Row


def tensors(row: Mapping[str, Any], default_reward: float = 0.0) -> dict[str, Any]:
    """``input_ids``, ``loss_mask``, ``logprobs`` and ``versions`` of shape [1, T], ``rewards`` of shape [1].

    ``versions`` is -1 on context, and where the weight version is unknown or no number.

    Raises:
        ValueError: the row is malformed.
    """
    read = Row.of(row)
    return {
        "input_ids": [read.token_ids],
        "attention_mask": [[1] * len(read.token_ids)],
        "loss_mask": [read.loss_mask],
        "logprobs": [read.log_probs],
        "versions": [read.versions()],
        "rewards": [default_reward if read.reward is None else read.reward],
    }
