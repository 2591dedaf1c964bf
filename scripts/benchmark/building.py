"""Child job: freeze and build one rollout that is stored, and how much memory that takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmark.measure import PeakMemory


async def run(start: Callable[[], None], *, directory: str, rollout_id: str) -> dict[str, Any]:
    """The peak in bytes above what the process held before."""
    from token_id_capture import TokenCaptureStore
    from token_id_capture.builder import prefix_merging, project_main_chain_trajectory

    async with TokenCaptureStore(Path(directory)) as store:
        start()
        memory = PeakMemory()
        snapshot = await store.freeze(rollout_id)
        trajectory = project_main_chain_trajectory(prefix_merging(snapshot.entries))
        return {"memory": memory.rise(), "tokens": len(trajectory.token_ids)}
