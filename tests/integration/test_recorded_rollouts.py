"""Recorded conversations of a real engine: through the gateway, the database and ``tokcap finalize``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from support.commands import RunTokcap
from support.replay import RECORDINGS, Gateway, Recording, running_gateway

CHAINS = (
    *("chain-clean", "chain-clean-stream", "chain-clean-text"),
    *("chain-drift", "chain-retry", "chain-compacted", "chain-reasoning"),
)


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path) as running:
        yield running


def calls(chain: str) -> list[str]:
    """The names of a chain's recordings, in the order in which they were made."""
    paths = sorted((RECORDINGS / chain).glob("*.request.json"))
    return [f"{chain}/{path.name.removesuffix('.request.json')}" for path in paths]


def recorded(name: str) -> tuple[list[int], list[int], list[float]]:
    """Prompt ids, sampled ids and log probabilities, read from the recording in the plainest way."""
    payload = Recording.named(name).payload
    frames = [payload] if payload.startswith(b"{") else payload.split(b"\n\n")
    datas = [frame.removeprefix(b"data: ") for frame in frames if frame.strip() and not frame.endswith(b"[DONE]")]
    prompt: list[int] = []
    ids: list[int] = []
    log_probs: list[float] = []
    for part in map(orjson.loads, datas):
        prompt = prompt or part.get("prompt_token_ids") or []
        for choice in part["choices"]:
            ids += choice.get("token_ids") or []
            log_probs += [each["logprob"] for each in (choice.get("logprobs") or {}).get("content") or ()]
    return prompt, ids, log_probs


async def finalized(gateway: Gateway, tmp_path: Path, tokcap: RunTokcap, *options: str) -> dict[str, dict[str, Any]]:
    """Replay every chain as a rollout of its name, finalize them all, and return the rows by rollout."""
    for chain in CHAINS:
        for name in calls(chain):
            await gateway.replay(name, rollout=chain)
    rollouts, output = tmp_path / "rollouts.jsonl", tmp_path / "train.jsonl"
    rollouts.write_text("".join(json.dumps({"_ng_rollout_id": chain, "reward": 1.0}) + "\n" for chain in CHAINS))
    finished = await asyncio.to_thread(
        tokcap, "finalize", rollouts, "--database", gateway.store.database, "--output", output, *options
    )
    assert finished.returncode == 0, finished.stderr
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    return {row["_ng_rollout_id"]: row for row in rows}


def sampled_positions(chain_calls: list[str]) -> dict[int, float]:
    """Where in the last call's sequence each sampled token stands, with its log probability."""
    positions: dict[int, float] = {}
    for name in chain_calls:
        prompt, _, log_probs = recorded(name)
        positions.update({len(prompt) + index: log_prob for index, log_prob in enumerate(log_probs)})
    return positions


async def test_recorded_rollouts_are_delivered_or_masked_as_they_deserve(
    gateway: Gateway, tmp_path: Path, tokcap: RunTokcap
) -> None:
    rows = await finalized(gateway, tmp_path, tokcap, "--format", "trajectory", "--retire")
    kept = {chain: calls(chain) for chain in ("chain-clean", "chain-clean-stream", "chain-clean-text")}
    kept["chain-retry"] = [name for name in calls("chain-retry") if not name.endswith("02-turn2")]
    for chain, delivered in kept.items():
        row = rows[chain]
        prompt, ids, _ = recorded(delivered[-1])
        sampled = sampled_positions(delivered)
        assert row["mask_sample"] is False
        assert row["token_ids"] == prompt + ids
        assert {position for position, loss in enumerate(row["loss_mask"]) if loss} == set(sampled)
        assert row["log_probs"] == [sampled.get(position, 0.0) for position in range(len(row["token_ids"]))]
        assert (await gateway.store.describe_rollout(chain)).summary.state == "retired"
    assert rows["chain-clean"]["token_ids"] == rows["chain-clean-stream"]["token_ids"]

    for chain, reason in (
        ("chain-drift", "multiple_chains"),
        ("chain-compacted", "multiple_roots"),
        ("chain-reasoning", "multiple_roots"),
    ):
        row = rows[chain]
        assert (row["mask_sample"], row["mask_reason"], row["token_ids"]) == (True, reason, [])
        assert (await gateway.store.describe_rollout(chain)).summary.outcome == "masked"
    [drift] = rows["chain-drift"]["_ng_token_capture"]["divergences"]
    assert (drift["turn"], drift["position"], drift["in_generation"]) == (3, 73, True)
    assert rows["chain-compacted"]["_ng_token_capture"]["roots"] == 2


async def test_the_rebuilt_response_holds_the_whole_prompt_and_the_sampled_ids_of_each_turn(
    gateway: Gateway, tmp_path: Path, tokcap: RunTokcap
) -> None:
    rows = await finalized(gateway, tmp_path, tokcap)
    items = [item for item in rows["chain-clean"]["response"]["output"] if "generation_token_ids" in item]
    turns = [(item["prompt_token_ids"], item["generation_token_ids"], item["generation_log_probs"]) for item in items]
    assert turns == [recorded(name) for name in calls("chain-clean")]
    assert "response" not in rows["chain-drift"]
    assert rows["chain-drift"]["mask_sample"] is True
