"""The main job of a child: store all calls of a workload, rollouts at once and calls in turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmark.consume import consume
from benchmark.inputs import Call, read_inputs
from benchmark.measure import Heartbeat, PeakMemory, Stopwatch, size_on_disk
from benchmark.responses import GatewayResponse, JsonLinesResponse
from benchmark.stores import Contestant, JsonLines, Limit, Ours

CONTESTANTS: dict[tuple[str, str], Callable[[Path], Contestant]] = {
    ("store", "ours"): Ours,
    ("store", "jsonl"): JsonLines,
    ("store", "limit"): Limit,
    ("response", "ours"): GatewayResponse,
    ("response", "jsonl"): JsonLinesResponse,
}


async def run(
    start: Callable[[], None],
    *,
    store: str,
    level: str,
    inputs: str,
    directory: str,
    part: int = 0,
    parts: int = 1,
    suffix: str = "",
    consumes: bool = False,
) -> dict[str, Any]:
    """Store every ``parts``-th rollout from ``part`` on; then read them back, if it ``consumes``.

    ``suffix`` is appended to the rollouts' ids, where one file is used several times.
    """
    tested = CONTESTANTS[level, store](Path(directory))
    rollouts = read_inputs(Path(inputs), tested.form, part=part, parts=parts, suffix=suffix)
    await tested.open()
    start()
    result = await play(tested, rollouts)
    result["disk_bytes"] = size_on_disk(Path(directory))
    if consumes:
        result |= await consume(store, Path(directory), [calls[0].rollout_id for calls in rollouts])
    return result


async def play(store: Contestant, rollouts: Sequence[Sequence[Call]]) -> dict[str, Any]:
    """Store all calls and close the store. Times are in seconds, sizes in bytes."""
    waits: list[float] = []

    async def rollout(calls: Sequence[Call]) -> None:
        waits.extend([await store.handle(call) for call in calls])

    memory, heartbeat = PeakMemory(), Heartbeat()
    started_at, watch = time.monotonic(), Stopwatch()
    await asyncio.gather(*map(rollout, rollouts))
    cpu = watch.cpu()
    ended_at = time.monotonic()
    heartbeat.stop()
    closing = Stopwatch()
    await store.close()
    return {
        "rollouts": len(rollouts),
        "started_at": started_at,
        "ended_at": ended_at,
        "cpu": cpu,
        "close": closing.wall(),
        "close_cpu": closing.cpu(),
        "block": heartbeat.longest,
        "memory": memory.rise(),
        "waits": waits,
    }
