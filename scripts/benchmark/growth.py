"""Child job: one rollout of many calls, one after the other; what a put costs early and late."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmark.measure import Stopwatch


async def run(start: Callable[[], None], *, directory: str, calls: int, prompt: int) -> dict[str, Any]:
    """Processor seconds of a put in the second fifth of ``calls`` and in the last. Each call adds two tokens."""
    from token_id_capture import LogProbs, TokenCaptureStore, TokenEntry, TokenIds

    rng = random.Random(0)
    token_ids = rng.choices(range(150_000), k=prompt + 2 * calls)
    costs: list[float] = []
    async with TokenCaptureStore(Path(directory)) as store:
        start()
        for call in range(calls):
            length = prompt + 2 * call
            entry = TokenEntry(
                rollout_id="growing",
                model_call_id=f"{rng.getrandbits(128):032x}",
                prompt_token_ids=TokenIds(token_ids[:length]),
                generation_token_ids=TokenIds(token_ids[length : length + 1]),
                generation_log_probs=LogProbs([-0.5]),
            )
            watch = Stopwatch()
            await store.put(entry)
            costs.append(watch.cpu())
    fifth = calls // 5
    return {"early": median(costs[fifth : 2 * fifth]), "late": median(costs[-fifth:])}
