"""OpenRLHF: what an agent's execution returns for one rollout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from token_id_capture.integrations.rows import Row


def experience(row: Mapping[str, Any]) -> dict[str, Any]:
    """Flat and unshifted; OpenRLHF takes one row a rollout, so give it rows of ``--sequences main``.

    ``action_ranges`` are [start, end) of each run of sampled tokens; a masked row has none.

    Raises:
        ValueError: the row is malformed.
    """
    read = Row.of(row)
    return {
        "observation_tokens": read.token_ids,
        "action_ranges": read.trained_spans,
        "rollout_log_probs": read.log_probs,
        "reward": read.reward,
        "truncated": read.truncated,
    }
