"""slime and miles: the fields of a ``Sample``."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from token_id_capture.integrations.rows import Row


def sample(row: Mapping[str, Any], group_index: int = 0, index: int = 0) -> dict[str, Any]:
    """``tokens`` are the whole sequence; ``loss_mask`` and ``rollout_log_probs`` belong to the response.

    The response begins with the first sampled token and has ``response_length`` tokens. Rows of one rollout share
    ``rollout_id``, a number; ``metadata`` has its id. ``status`` is ``truncated``, ``completed``, or ``aborted``
    for a masked row, in words as ``Sample.from_dict`` takes them.

    Raises:
        ValueError: the row is malformed.
    """
    read = Row.of(row)
    start = read.prompt_length
    status = "aborted" if read.masked else "truncated" if read.truncated else "completed"
    return {
        "group_index": group_index,
        "index": index,
        "rollout_id": numbered(str(row.get("rollout_id"))),
        "tokens": read.token_ids,
        "response_length": len(read.token_ids) - start,
        "loss_mask": read.loss_mask[start:],
        "rollout_log_probs": read.log_probs[start:],
        "reward": read.reward,
        "weight_versions": read.weight_versions,
        "status": status,
        "remove_sample": read.masked,
        "metadata": {"rollout_id": row.get("rollout_id"), "mask_reason": row.get("mask_reason")},
    }


def numbered(rollout_id: str) -> int:
    """A rollout's id as a number below 2**53, the same for each of its rows: slime averages the loss by it."""
    return int.from_bytes(sha256(rollout_id.encode()).digest()[:8], "big") >> 11
