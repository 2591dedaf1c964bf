"""prime-rl: the fields of a ``TrainingSample``, one a branch of the rollout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from token_id_capture.integrations.rows import Row


def training_sample(row: Mapping[str, Any], advantage: float, env_name: str) -> dict[str, Any]:
    """Four flat arrays of one length, and ``advantages`` of the same length.

    ``advantages`` holds ``advantage`` where the row has loss and 0.0 elsewhere.

    Raises:
        ValueError: the row is malformed.
    """
    read = Row.of(row)
    return {
        "token_ids": read.token_ids,
        "mask": [bool(one) for one in read.loss_mask],
        "logprobs": read.log_probs,
        "temperatures": [read.temperature] * len(read.token_ids),
        "advantages": [advantage * one for one in read.loss_mask],
        "env_name": env_name,
    }
