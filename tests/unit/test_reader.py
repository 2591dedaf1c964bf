"""The connections on which a store answers queries."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from token_id_capture.store import TokenCaptureStore

_LOOPS = 4


def test_event_loops_in_several_threads_may_ask_at_once(tmp_path: Path) -> None:
    store = TokenCaptureStore(tmp_path)
    asyncio.run(store.mark_incomplete("first", reason="lost_stream"))
    together = threading.Barrier(_LOOPS)

    async def ask() -> list[str]:
        details = await asyncio.gather(*(store.describe_rollout("first") for _ in range(4)))
        return [detail.summary.rollout_id for detail in details]

    def run() -> list[str]:
        together.wait(10)
        return asyncio.run(asyncio.wait_for(ask(), 20))

    with ThreadPoolExecutor(_LOOPS) as threads:
        answers = [future.result() for future in [threads.submit(run) for _ in range(_LOOPS)]]
    asyncio.run(store.close())
    assert answers == [["first"] * 4] * _LOOPS
