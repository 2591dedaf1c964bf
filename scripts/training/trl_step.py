"""One step of TRL's own ``GRPOTrainer`` on rows, a masked one among them."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from token_id_capture.integrations import trl


def step(model_path: Path, rows: list[dict[str, Any]]) -> float:
    """The loss of one optimizer step over a group of all ``rows``; it is finite, or TRL would not train on them."""

    def rollouts(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        return trl.rollout_outputs(rows)

    def rewards(reward: list[float], **_: Any) -> list[float]:
        return [value + place for place, value in enumerate(reward)]

    with tempfile.TemporaryDirectory() as directory:
        settings = GRPOConfig(
            output_dir=directory,
            per_device_train_batch_size=len(rows),
            num_generations=len(rows),
            max_steps=1,
            report_to=[],
            use_cpu=True,
            bf16=False,
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model_path),
            processing_class=AutoTokenizer.from_pretrained(model_path),
            reward_funcs=rewards,
            args=settings,
            train_dataset=Dataset.from_list([{"prompt": "a"}] * len(rows)),
            rollout_func=rollouts,
        )
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if len(losses) != 1 or not math.isfinite(losses[0]):
        raise SystemExit(f"TRL did not train: {losses}")
    return float(losses[0])
