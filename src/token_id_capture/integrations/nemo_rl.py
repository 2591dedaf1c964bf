"""NeMo-RL: a ``DatumSpec``, in turns of one role each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from token_id_capture.integrations.rows import Row


def datum(row: Mapping[str, Any], index: int = 0) -> dict[str, Any]:
    """The fields of a ``DatumSpec``. Arrays are lists: turn them into tensors with ``torch.tensor``.

    ``message_log`` alternates ``user`` (context) and ``assistant`` (sampled) messages; an assistant
    message has one ``generation_logprobs`` a token. ``loss_multiplier`` is 0.0 for a masked row, whose
    one assistant message is there because the loader asks for generated data before it looks at
    ``mask_sample``.

    Raises:
        ValueError: the row is malformed.
    """
    read = Row.of(row)
    spans = read.trained_spans or [(read.prompt_length, len(read.token_ids))]
    messages: list[dict[str, Any]] = []
    position = 0
    for start, end in spans:
        if start > position:
            messages.append({"role": "user", "content": "", "token_ids": read.token_ids[position:start]})
        sampled = {"token_ids": read.token_ids[start:end], "generation_logprobs": read.log_probs[start:end]}
        messages.append({"role": "assistant", "content": "", **sampled})
        position = end
    if position < len(read.token_ids):
        messages.append({"role": "user", "content": "", "token_ids": read.token_ids[position:]})
    return {
        "message_log": messages,
        "length": len(read.token_ids),
        "extra_env_info": {"rollout_id": row.get("rollout_id"), "reward": read.reward},
        "loss_multiplier": 0.0 if read.masked else 1.0,
        "mask_sample": read.masked,
        "idx": index,
    }
