"""Rollouts of three calls through an unmodified model server of Gym with two workers, into our database.

Both consumers are tried: Gym's own on what its server captured and on what our gateway would have
captured, and ours on what Gym captured. Prints what was seen as JSON; exit code 1 if anything differs.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from model_server import CONFIG
from nemo_gym.token_id_capture.delivery import finalize_rollout_token_capture, retire_rollout_token_capture

from token_id_capture import TokenCaptureStore, TokenEntry, delivery
from token_id_capture.integrations.nemo_gym import CaptureSource
from token_id_capture.records import TOKEN_FIELDS

ENDPOINTS = "token_id_capture.integrations.nemo_gym"
ROLLOUTS = 8
TURNS = 3
LIMIT_SECONDS = 90


@contextmanager
def server(database: Path, **more: Any) -> Iterator[str]:
    """The model server with two workers; its base URL."""
    block = {
        "enabled": True,
        "sink": f"{ENDPOINTS}:CaptureSink",
        "sink_kwargs": {"database": str(database)},
        "lineage_store": f"{ENDPOINTS}:LineageStore",
        "lineage_store_kwargs": {"database": str(database)},
        **more,
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, CONFIG: json.dumps({"token_id_capture": block})}
    options = ("--factory", "--workers", "2", "--port", str(port), "--log-level", "warning")
    command = [sys.executable, "-m", "uvicorn", "model_server:app", *options]
    process = subprocess.Popen(command, env=environment, cwd=Path(__file__).parent)
    try:
        wait_for(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Until the server accepts connections."""
    end = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < end and process.poll() is None:
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise SystemExit("the model server did not start")


def play(base: str, rollout_id: str) -> dict[str, Any]:
    """One rollout: three calls, each on a connection of its own, so that workers take turns. Its record."""
    items: list[dict[str, Any]] = [{"role": "user", "content": f"question of {rollout_id}."}]
    response: dict[str, Any] = {}
    for _ in range(TURNS):
        url = f"{base}/ng-rollout/{rollout_id}/training-token-capture/v1/responses"
        answered = httpx.post(url, json={"input": items}, timeout=30)
        if answered.is_error:
            raise SystemExit(f"{url} answered {answered.status_code}: {answered.text[:500]}")
        response = answered.json()
        said = [
            {name: value for name, value in item.items() if name not in TOKEN_FIELDS and value is not None}
            for item in response["output"]
        ]
        items = [*items, *said, {"role": "user", "content": "and then?"}]
    task, rollout = rollout_id.split("-")
    bare = {**response, "output": said}
    return {"_ng_task_index": int(task), "_ng_rollout_index": int(rollout), "reward": 1.0, "response": bare}


async def deliver(database: Path, records: list[dict[str, Any]]) -> dict[str, int]:
    """Gym's own consumer on our source: builds, attributes, retires."""
    source = CaptureSource(database)
    seen = {"delivered": 0, "attributed": 0, "retired": 0, "resolved": 0}
    for record in records:
        rollout_id = f"{record['_ng_task_index']}-{record['_ng_rollout_index']}"
        frozen = await source.freeze(rollout_id)
        seen["resolved"] += sum(str(entry.parent_resolution) == "resolved" for entry in frozen.entries)
        built = await finalize_rollout_token_capture(record, source)
        assert built is not None
        seen["delivered"] += not built["mask_sample"]
        seen["attributed"] += built["metrics"].get("terminal_attribution") not in (None, "", "unattributed")
        seen["retired"] += await retire_rollout_token_capture(rollout_id, source, built)
    await source.close()
    return seen


async def gateway_captured(database: Path) -> bool:
    """Gym's consumer on a rollout without lineage, as our gateway stores it."""
    async with TokenCaptureStore(database) as store:
        for number, (prompt, sampled) in enumerate((([1, 2], [3]), ([1, 2, 3, 4], [5]))):
            await store.put(
                TokenEntry(
                    rollout_id="900-0",
                    model_call_id=f"call-{number}",
                    prompt_token_ids=prompt,
                    generation_token_ids=sampled,
                    generation_log_probs=[-0.5],
                    output_items=[{"type": "message", "role": "assistant", "content": f"text {number}"}],
                    token_item_index=0,
                    response_id=f"resp-{number}",
                )
            )
    record = {"_ng_task_index": 900, "_ng_rollout_index": 0, "response": {"id": "resp-1", "output": []}}
    source = CaptureSource(database)
    built = await finalize_rollout_token_capture(record, source)
    await source.close()
    return built is not None and not built["mask_sample"]


async def finalized_by_us(database: Path, records: list[dict[str, Any]]) -> int:
    """Our consumer on what Gym captured."""
    delivered = 0
    async with TokenCaptureStore(database) as store:
        for record in records:
            built = await delivery.finalize_rollout_token_capture(record, store)
            delivered += built is not None and not built["mask_sample"]
    return delivered


async def freeze_one(database: Path) -> None:
    """Leave rollout 1-0 frozen, as an earlier run would."""
    async with TokenCaptureStore(database) as store:
        await store.mark_incomplete("1-0", "call")
        await store.freeze("1-0")


async def rollout_ids(database: Path) -> list[str]:
    """The rollouts that the database knows."""
    async with TokenCaptureStore(database) as store:
        return [summary.rollout_id for summary in await store.list_rollouts()]


def launched(database: Path) -> bool:
    """Whether ``tokcap gym`` makes its process a collector, passes the settings on, and clears before dispatch."""
    asyncio.run(freeze_one(database))
    script = str(Path(__file__).with_name("launched.py"))
    command = ["-W", "ignore", "-m", "token_id_capture", "gym", "--database", str(database), "--", script, "+limit=1"]
    ran = subprocess.run([sys.executable, *command], check=True, capture_output=True, text=True)
    found = json.loads(ran.stdout)
    return (
        found["installed"] == ["CaptureSink", "LineageStore", "CaptureSource"]
        and found["arguments"][:2] == ["+limit=1", "++token_id_capture.enabled=true"]
        and asyncio.run(rollout_ids(database)) == []
    )


def main() -> None:
    """Every way once, on databases of their own."""
    seen: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, more in (("whole", {}), ("delta", {"delta_records": True})):
            database = Path(directory) / f"{name}.db"
            with server(database, **more) as base:
                records = [play(base, f"{number}-0") for number in range(ROLLOUTS)]
                ours = [play(base, f"{number}-1") for number in range(ROLLOUTS)]
            seen[name] = asyncio.run(deliver(database, records))
            seen[name]["delivered_by_us"] = asyncio.run(finalized_by_us(database, ours))
        seen["launched"] = launched(Path(directory) / "launched.db")
        seen["gateway_captured"] = asyncio.run(gateway_captured(Path(directory) / "gateway.db"))
    json.dump(seen, sys.stdout)
    print()
    wanted = {
        "delivered": ROLLOUTS,
        "retired": ROLLOUTS,
        "resolved": ROLLOUTS * (TURNS - 1),
        "delivered_by_us": ROLLOUTS,
    }
    differs = [name for name in ("whole", "delta") if not wanted.items() <= seen[name].items()]
    sys.exit(1 if differs or not seen["gateway_captured"] or not seen["launched"] else 0)


if __name__ == "__main__":
    main()
