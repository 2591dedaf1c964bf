"""What comes after the rollouts: freeze, build a flat trajectory, drop; for JSON lines, parse and delete."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import orjson


async def consume(store: str, directory: Path, rollout_ids: Sequence[str]) -> dict[str, float]:
    """Read every rollout back and release it; the results are seconds of all rollouts together."""
    if store == "ours":
        return await _build_trajectories(directory, rollout_ids)
    if store == "jsonl":
        return _parse_lines(directory, rollout_ids)
    return {}


async def _build_trajectories(directory: Path, rollout_ids: Sequence[str]) -> dict[str, float]:
    from token_id_capture import TokenCaptureStore
    from token_id_capture.builder import prefix_merging, project_main_chain_trajectory

    freezing = building = dropping = 0.0
    # Opened anew: nothing is remembered from the writing.
    async with TokenCaptureStore(directory) as store:
        for rollout_id in rollout_ids:
            start = time.perf_counter()
            snapshot = await store.freeze(rollout_id)
            frozen = time.perf_counter()
            trajectory = project_main_chain_trajectory(prefix_merging(snapshot.entries))
            built = time.perf_counter()
            assert len(trajectory.token_ids) == len(trajectory.log_probs)
            dropped = await store.drop(rollout_id, snapshot_id=snapshot.snapshot_id, version=snapshot.version)
            assert dropped
            freezing, building = freezing + frozen - start, building + built - frozen
            dropping += time.perf_counter() - built
    return {"freeze": freezing, "read": freezing + building, "drop": dropping}


def _parse_lines(directory: Path, rollout_ids: Sequence[str]) -> dict[str, float]:
    reading = dropping = 0.0
    for rollout_id in rollout_ids:
        path = directory / f"{rollout_id}.jsonl"
        start = time.perf_counter()
        records = [orjson.loads(line) for line in path.read_bytes().splitlines()]
        read = time.perf_counter()
        assert records
        path.unlink()
        reading += read - start
        dropping += time.perf_counter() - read
    return {"read": reading, "drop": dropping}
