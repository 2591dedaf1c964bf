"""verl: the fields of an ``AgentLoopOutput``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from token_id_capture.integrations.rows import Row


def agent_loop_output(row: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of ``AgentLoopOutput``: prompt and response split before the first sampled token.

    ``metrics`` is left at verl's defaults, and ``extra_fields`` names the rollout, so that rows of one
    rollout can be told.

    Raises:
        ValueError: the row is malformed.
    """
    read = Row.of(row)
    start = read.prompt_length
    return {
        "prompt_ids": read.token_ids[:start],
        "response_ids": read.token_ids[start:],
        "response_mask": read.loss_mask[start:],
        "response_logprobs": read.log_probs[start:],
        "reward_score": read.reward,
        "num_turns": len(read.turns),
        "metrics": {},
        "extra_fields": {name: row.get(name) for name in ("rollout_id", "sequence", "sequences", "mask_reason")},
    }
