"""``tokcap serve --hand-off-key-file`` and ``tokcap finalize --gateway``, as real processes."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from support.commands import RunTokcap
from support.finalizing import as_line, record, two_turns
from support.served import refused, serving
from token_id_capture.store import TokenCaptureStore

NOBODY = "http://127.0.0.1:9"
TASKS = range(20)


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    for name in ("agents", "trainer"):
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_text(f"key-of-{name}\n")
    return {name: str(tmp_path / name) for name in ("agents", "trainer")}


async def test_finalize_writes_over_the_network_what_it_writes_from_the_file(
    tmp_path: Path, tokcap: RunTokcap, keys: dict[str, str]
) -> None:
    databases = {name: tmp_path / name for name in ("here.db", "there.db")}
    async with TokenCaptureStore(databases["there.db"]) as store:
        await asyncio.gather(*(store.put(entry) for task in TASKS for entry in two_turns(f"{task}-0")))
        await store.mark_incomplete("3-0", "b", "lost_stream")
        for task in TASKS:  # so that both have the same snapshots
            await store.freeze(f"{task}-0")
    shutil.copy(databases["there.db"], databases["here.db"])
    rollouts = tmp_path / "rollouts.jsonl"
    rollouts.write_bytes(b"".join(as_line(record(task)) for task in [*TASKS, 99]))

    def finalized(output: str, *source: object) -> dict[str, Any]:
        options = ("--json", "--retire", "--sequences", "all", "--masked", "placeholder")
        done = tokcap("finalize", rollouts, "-o", tmp_path / output, *options, *source)
        return {**json.loads(done.stdout), "code": done.returncode}

    async with serving(
        databases["there.db"], NOBODY, "--api-key-file", keys["agents"], "--hand-off-key-file", keys["trainer"]
    ) as server:
        gateway = ("--gateway", server.url, "--key-file", keys["trainer"])
        there = await asyncio.to_thread(finalized, "there.jsonl", *gateway)
        again = await asyncio.to_thread(finalized, "there.jsonl", *gateway)
        wrong = await asyncio.to_thread(
            tokcap, "finalize", rollouts, "-o", tmp_path / "no", "--gateway", server.url, "--key-file", keys["agents"]
        )
        await server.stop(signal.SIGTERM)
    here = finalized("here.jsonl", "-d", databases["here.db"])
    assert there == here
    assert (there["code"], there["written"], there["masked"], there["retired"], there["unknown"]) == (1, 21, 2, 19, 1)
    assert (again["code"], again["written"], again["already_there"]) == (0, 0, 21)
    assert (tmp_path / "there.jsonl").read_bytes() == (tmp_path / "here.jsonl").read_bytes()
    assert wrong.returncode == 2
    assert (
        wrong.stderr == f"tokcap: the gateway at {server.url} refuses the key: send that of its --hand-off-key-file\n"
    )


def test_finalize_takes_rollouts_from_one_place_and_needs_a_key(tmp_path: Path, tokcap: RunTokcap) -> None:
    (tmp_path / "rollouts.jsonl").touch()
    command = ("finalize", tmp_path / "rollouts.jsonl", "-o", tmp_path / "rows.jsonl")
    for more, said in (
        ((), "name the --database of the rollouts, or a --gateway"),
        (("-d", "x.db", "--gateway", NOBODY), "name a --database or a --gateway, not both"),
        (("--gateway", NOBODY), "--gateway needs --key-file"),
        (("--gateway", NOBODY, "--key-file", tmp_path / "none"), "cannot read the key file"),
    ):
        done = tokcap(*command, *more)
        assert (done.returncode, done.stderr.startswith(f"tokcap: {said}")) == (2, True), done.stderr


async def test_the_key_of_agents_is_refused_as_that_of_the_hand_off(
    tokcap: RunTokcap, tmp_path: Path, keys: dict[str, str]
) -> None:
    (tmp_path / "copy").touch(0o600)
    (tmp_path / "copy").write_text("key-of-agents")
    said = await refused(
        tokcap,
        *("-u", NOBODY, "-d", str(tmp_path / "c.db"), "--no-check"),
        *("--api-key-file", keys["agents"], "--hand-off-key-file", str(tmp_path / "copy")),
    )
    assert said.endswith("holds the key of --api-key-file, which agents know: use a different key")
