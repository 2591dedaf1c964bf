"""Capture rollouts of a real model, finalize them, and train on them as trainers would.

The policy is the tiny model of ``tests/data/model`` in float32. Each rollout has three turns: the model
samples, a user's tokens follow, and the next prompt is the whole sequence so far. Rows come from
``tokcap finalize``; the importance ratio is the model's probability of each token with loss, scored in one
pass over the row, to the captured one. Prints JSON.
"""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import own_types
import torch
from readers import readers
from transformers import AutoModelForCausalLM
from trl_step import step

from token_id_capture import TokenCaptureStore, TokenEntry
from token_id_capture.integrations import areal, prime_rl, tinker, trl

MODEL = Path(__file__).parents[2] / "tests" / "data" / "model"
ROLLOUTS = 12
TURNS = 3
LONGEST_ANSWER = 24
LARGEST_ERROR = 1e-5


def sample(model: Any, prompt: list[int], seed: int) -> tuple[list[int], list[float]]:
    """An answer to ``prompt`` and the log probability of each of its tokens, at temperature 1."""
    chance = torch.Generator().manual_seed(seed)
    tokens, log_probs = list(prompt), []
    for _ in range(1 + seed % LONGEST_ANSWER):
        with torch.no_grad():
            scores = torch.log_softmax(model(torch.tensor([tokens])).logits[0, -1].float(), dim=-1)
        chosen = int(torch.multinomial(scores.exp(), 1, generator=chance))
        tokens.append(chosen)
        log_probs.append(float(scores[chosen]))
    return tokens[len(prompt) :], log_probs


async def capture(model: Any, database: Path) -> None:
    """Put every call of every rollout into the database."""
    async with TokenCaptureStore(database) as store:
        for rollout in range(ROLLOUTS):
            sequence = [5 + rollout, 6, 7, 8]
            for turn in range(TURNS):
                answer, log_probs = sample(model, sequence, seed=rollout * TURNS + turn + 1)
                await store.put(
                    TokenEntry(
                        rollout_id=f"{rollout}-0",
                        model_call_id=f"call-{turn}",
                        prompt_token_ids=sequence,
                        generation_token_ids=answer,
                        generation_log_probs=log_probs,
                        sampling={"temperature": 1.0},
                        finish_reason="stop",
                    )
                )
                sequence = [*sequence, *answer, 9, 10 + turn]


def finalize(database: Path, output: Path, *options: str) -> Path:
    """The rows of ``tokcap finalize``; the last rollout was never captured, so its row is masked."""
    records = output.parent / "records.jsonl"
    lines = [
        {"_ng_task_index": rollout, "_ng_rollout_index": 0, "reward": 1.0, "response": {"output": []}}
        for rollout in range(ROLLOUTS + 1)
    ]
    records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["finalize", str(records), "--database", str(database), "--output", str(output), *options]
    done = subprocess.run([sys.executable, "-m", "token_id_capture", *command], check=False, capture_output=True)
    assert done.returncode == 1, done.stderr  # one rollout is unknown
    return output


def read(output: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in output.read_text().splitlines()]


def score(model: Any, tokens: list[int]) -> torch.Tensor:
    """The log probability of each token but the first, in one pass."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        scores = torch.log_softmax(model(ids).logits[0].float(), dim=-1)
    return scores[:-1].gather(1, ids[0, 1:, None])[:, 0]


def largest_ratio_error(model: Any, rows: list[dict[str, Any]]) -> dict[str, float]:
    """By trainer, how far the importance ratio of any token is from 1, from that trainer's own fields."""

    def flat(fields: dict[str, Any], names: tuple[str, str, str]) -> float:
        tokens, mask, log_probs = (fields[name] for name in names)
        return worst(tokens, mask, log_probs)

    def split(fields: dict[str, Any]) -> float:
        (prompt,), (response,) = fields["prompt_ids"], fields["completion_ids"]
        padding = [0] * len(prompt)
        return worst([*prompt, *response], [*padding, *fields["env_mask"][0]], [*padding, *fields["logprobs"][0]])

    def shifted(fields: dict[str, Any]) -> float:
        inputs = fields["loss_fn_inputs"]
        tokens = [fields["model_input"][0], *inputs["target_tokens"]]
        return worst(tokens, [0, *inputs["mask"]], [0.0, *inputs["logprobs"]])

    def worst(tokens: list[int], mask: list[Any], log_probs: list[float]) -> float:
        scored = score(model, tokens)
        pairs = zip(scored.tolist(), mask[1:], log_probs[1:], strict=True)
        return max((abs(math.exp(new - old) - 1) for new, one, old in pairs if one), default=0.0)

    ways: dict[str, Callable[[dict[str, Any]], float]] = {
        "trl": lambda row: split(trl.rollout_outputs([row])),
        "trl async": lambda row: flat(trl.rollout_sample(row, 1.0), ("input_ids", "completion_mask", "old_log_probs")),
        "prime_rl": lambda row: flat(prime_rl.training_sample(row, 1.0, "env"), ("token_ids", "mask", "logprobs")),
        "tinker": lambda row: shifted(tinker.datum(row, 1.0)),
    }
    return {name: max(way(row) for row in rows if not row["mask_sample"]) for name, way in ways.items()}


def load(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Rows, the masked one too, in trainers' own types and in tensors; how many each took."""
    import tinker as tinker_package

    taken = {"tinker Datum": 0, "torch int64": 0, "torch int32": 0}
    for row in rows:
        datum = tinker.datum(row, 1.0)
        inputs = {
            name: tinker_package.TensorData.from_torch(torch.tensor(values))
            for name, values in datum["loss_fn_inputs"].items()
        }
        tinker_package.Datum(
            model_input=tinker_package.ModelInput.from_ints(datum["model_input"]), loss_fn_inputs=inputs
        )
        taken["tinker Datum"] += 1
        for name, kind in (("torch int64", torch.int64), ("torch int32", torch.int32)):
            torch.nn.Embedding(512, 4)(torch.tensor(areal.tensors(row)["input_ids"], dtype=kind) % 512)
            taken[name] += 1
    return taken


def main() -> int:
    """The exit code."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        asyncio.run(capture(model, directory / "captures.db"))
        flat = ("--format", "trajectory")
        lines = finalize(directory / "captures.db", directory / "rows.jsonl", *flat)
        rows = read(lines)
        columns = finalize(directory / "captures.db", directory / "rows.parquet", *flat)
        filled = [row for row in rows if not row["mask_sample"]]
        for masked in ("keep", "placeholder"):
            output = directory / f"{masked}.jsonl"
            filled += read(finalize(directory / "captures.db", output, *flat, "--masked", masked))[-1:]
        records = read(
            finalize(directory / "captures.db", directory / "records-of-gym.jsonl", "--masked", "placeholder")
        )
        opened = readers(lines, columns)
    errors = largest_ratio_error(model, rows)
    trained = sum(sum(row["loss_mask"]) for row in rows)
    masked = sum(row["mask_sample"] for row in rows)
    found = {"rows": len(rows), "masked": masked, "tokens with loss": trained, "largest error of the ratio": errors}
    loaded = {**load(filled), **own_types.load(filled, records, Path(sys.argv[1])), "trl GRPOTrainer": 4}
    loss = step(MODEL, filled[-4:])
    print(json.dumps({**found, "loaded": loaded, "opened": opened, "loss of a step of trl": loss}, indent=1))
    return 1 if max(errors.values()) > LARGEST_ERROR or len(rows) != ROLLOUTS + 1 or masked != 1 else 0


if __name__ == "__main__":
    sys.exit(main())
