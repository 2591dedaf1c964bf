"""A database with one rollout of each fate, named by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from token_id_capture.consumer import trajectories_from_source
from token_id_capture.delivery import retire_rollout_token_capture
from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore

EPOCH = 1.75e9


def entry(rollout_id: str, call: str, prompt: list[int], generation: list[int], **more: Any) -> TokenEntry:
    return TokenEntry(
        rollout_id=rollout_id,
        model_call_id=call,
        model="policy",
        prompt_token_ids=prompt,
        generation_token_ids=generation,
        generation_log_probs=[-0.1 - index for index in range(len(generation))],
        finish_reason="stop",
        created_at=EPOCH,
        **more,
    )


async def fill(path: Path) -> None:
    async with TokenCaptureStore(path) as store:
        await store.put(entry("delivered", "one", [1, 2], [3, 4], weight_version="w1"))
        await store.put(entry("delivered", "two", [1, 2, 3, 4, 5], [6], weight_version="w2"))
        snapshot = await store.freeze("delivered")
        await store.record_outcome(snapshot.snapshot_id, snapshot.version, "delivered")

        await store.put(entry("frozen", "a", [7], [8]))
        await store.put(entry("frozen", "b", [7], [9]))
        await store.put(entry("frozen", "c", [7, 8, 10], [11]))
        await store.freeze("frozen")

        await store.put(entry("marked", "only", [1], [2]))
        await store.freeze("marked")
        await store.mark_incomplete("marked", reason="uncaptured_endpoint")

        await store.put(entry("open", "only", [20, 21], [22]))

        await store.put(entry("retired", "only", [1], [2]))
        built = await trajectories_from_source("retired", store)
        assert await retire_rollout_token_capture("retired", store, built)

        await store.put(entry("two-roots", "x", [1, 2], [3]))
        await store.put(entry("two-roots", "y", [9, 9, 9], [3]))
        await trajectories_from_source("two-roots", store)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
