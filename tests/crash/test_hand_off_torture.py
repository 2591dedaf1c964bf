"""A trainer elsewhere dies and its network breaks, at any byte: no row is lost, and none comes twice."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from pathlib import Path
from typing import Any

from support.children import Child, Start
from support.finalizing import SEQUENCE, as_line, record, two_turns
from support.replay import serving
from support.taking import BreakingNetwork
from token_id_capture.hand_off.routes import HandOff
from token_id_capture.lifecycle import Outcome, State
from token_id_capture.server.app import create_app
from token_id_capture.server.http.auth import KeyedApp
from token_id_capture.store import TokenCaptureStore

KEY = "key-of-the-trainer"
ROLLOUTS, MASKED, RUNS = 32, 7, 200


async def test_a_client_killed_at_any_point_over_a_broken_network_loses_nothing_and_gets_nothing_twice(
    start: Start, database: Path, tmp_path: Path
) -> None:
    rollouts, output = tmp_path / "rollouts.jsonl", tmp_path / "train.jsonl"
    rollouts.write_bytes(b"".join(as_line(record(task)) for task in range(ROLLOUTS)))
    running: list[Child] = []

    def kill_at_every_third() -> None:
        if network.breaks % 3 == 0:
            running[0].signal(signal.SIGKILL)

    served = TokenCaptureStore(database)
    app = create_app("http://127.0.0.1:9", served, hand_off=KeyedApp(HandOff(served).app(), KEY))
    async with TokenCaptureStore(database) as store, serving(app) as (url, _):
        await asyncio.gather(*(store.put(entry) for task in range(ROLLOUTS) for entry in two_turns(f"{task}-0")))
        await store.mark_incomplete(f"{MASKED}-0", "b", "lost_stream")
        network = BreakingNetwork(url, random.Random(4), 16_000, kill_at_every_third)
        kills = 0
        async with network.running() as broken:
            for _ in range(RUNS):
                running[:] = [start("take", broken, KEY, rollouts, output)]
                code = await ended(running[0])
                kills += code == -signal.SIGKILL
                await no_rollout_is_gone_whose_row_is_not_there(store, output)
                if code == 0:
                    break
        assert code == 0, running[0].text()
        rows = rows_in(output)
        assert [row["_ng_task_index"] for row in rows] == list(range(ROLLOUTS))
        assert [row["token_ids"] for row in rows] == [[] if task == MASKED else SEQUENCE for task in range(ROLLOUTS)]
        found = {one.rollout_id: (one.state, one.outcome) for one in await store.list_rollouts()}
        assert found.pop(f"{MASKED}-0") == (State.FROZEN, Outcome.MASKED)
        assert set(found.values()) == {(State.RETIRED, Outcome.DELIVERED)}
        assert len(found) == ROLLOUTS - 1
    # Else it was no torture.
    assert kills >= 2
    assert network.breaks >= 6


def rows_in(output: Path) -> list[dict[str, Any]]:
    """The rows that were written whole."""
    lines = output.read_bytes().splitlines(keepends=True) if output.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


async def ended(child: Child) -> int:
    """Its exit code; the gateway and the network of this process serve it meanwhile."""
    async with asyncio.timeout(60):
        while (code := child.poll()) is None:  # noqa: ASYNC110  the end of a process is no event
            await asyncio.sleep(0.002)
    return code


async def no_rollout_is_gone_whose_row_is_not_there(store: TokenCaptureStore, output: Path) -> None:
    there = {row["rollout_id"] for row in rows_in(output)}
    gone = {one.rollout_id for one in await store.list_rollouts() if one.state is State.RETIRED}
    assert gone <= there
