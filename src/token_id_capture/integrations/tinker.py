"""Tinker: the parts of a ``Datum``. Tinker's caller shifts, so this is the one adapter that does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from token_id_capture.integrations.rows import Row


def datum(row: Mapping[str, Any], advantage: float) -> dict[str, Any]:
    """``model_input`` is the sequence without its last token; each of the ``loss_fn_inputs`` is the rest.

    All five have N - 1 items: item i of the loss inputs belongs to the token that follows item i of the
    model input. ``advantages`` and ``logprobs`` are 0.0 where ``mask`` is.

    Raises:
        ValueError: the row is malformed.
    """
    read = Row.of(row)
    mask = read.loss_mask[1:]
    return {
        "model_input": read.token_ids[:-1],
        "loss_fn_inputs": {
            "target_tokens": read.token_ids[1:],
            "logprobs": read.log_probs[1:],
            "advantages": [advantage * one for one in mask],
            "mask": [float(one) for one in mask],
        },
    }
