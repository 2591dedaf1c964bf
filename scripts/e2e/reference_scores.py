"""Score delivered rows with the model in transformers, which shares no code with the engine.

Run by the Python of vLLM's environment: ``python reference_scores.py MODEL DTYPE ROWS``. Prints the
absolute differences to the rows' log probabilities as one JSON array.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def differences(model: Any, row: dict[str, Any]) -> list[float]:
    """For each sampled token of a row, how far its log probability is from that of a forward pass in torch."""
    import torch

    ids = torch.tensor(row["token_ids"])
    with torch.no_grad():
        scores = torch.log_softmax(model(ids[None]).logits[0].float(), dim=-1)
    # The scores at a position are those of the token behind it.
    known = torch.tensor(row["log_probs"], dtype=torch.float64)[1:]
    apart = (scores[:-1].gather(1, ids[1:, None])[:, 0].double() - known).abs()
    values: list[float] = apart[torch.tensor(row["loss_mask"])[1:] == 1].tolist()
    return values


def main(model_folder: str, dtype: str, rows_file: str) -> None:
    """Read the rows, and print the differences."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=dtype).eval()
    rows = map(json.loads, Path(rows_file).read_text("utf-8").splitlines())
    print(json.dumps([value for row in rows if not row["mask_sample"] for value in differences(model, row)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
