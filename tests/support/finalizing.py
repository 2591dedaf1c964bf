"""What the tests of ``tokcap finalize`` share: captured rollouts, their records, and the command on them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.commands import TOKCAP, RunTokcap, clean_environment
from token_id_capture import reasons
from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore

PROMPT, FIRST, BETWEEN, SECOND = [1, 2], [10, 11, 99], [5, 6], [12, 99]
SEQUENCE = [*PROMPT, *FIRST, *BETWEEN, *SECOND]
LOSS_MASK = [0, 0, 1, 1, 1, 0, 0, 1, 1]
LOG_PROBS = [0.0, 0.0, -0.25, -0.25, -0.25, 0.0, 0.0, -0.25, -0.25]


def two_turns(rollout_id: str) -> list[TokenEntry]:
    """One agent, two turns: the second prompt continues the first answer."""
    turns = [("a", PROMPT, FIRST), ("b", [*PROMPT, *FIRST, *BETWEEN], SECOND)]
    return [
        TokenEntry(
            rollout_id=rollout_id,
            model_call_id=call,
            prompt_token_ids=prompt,
            generation_token_ids=generation,
            generation_log_probs=[-0.25] * len(generation),
            output_items=[{"type": "message", "role": "assistant", "content": call}],
            token_item_index=0,
            created_at=1.75e9,
        )
        for call, prompt, generation in turns
    ]


def record(task: int, **fields: Any) -> dict[str, Any]:
    """A finished rollout as an agent framework writes it."""
    return {
        "_ng_task_index": task,
        "_ng_rollout_index": 0,
        "reward": task / 7,
        "response": {"id": f"resp-{task}", "output": [{"type": "message", "content": "as the harness saw it"}]},
        "note": "größer \u2028 als",
        **fields,
    }


@dataclass
class Bench:
    """A database with captured rollouts, their records in a file, and the file for the rows."""

    directory: Path
    tokcap: RunTokcap

    @property
    def database(self) -> Path:
        return self.directory / "captures.db"

    @property
    def rollouts(self) -> Path:
        return self.directory / "rollouts.jsonl"

    @property
    def output(self) -> Path:
        return self.directory / "train.jsonl"

    def capture(self, tasks: Sequence[int], incomplete: Sequence[int] = ()) -> None:
        async def put() -> None:
            async with TokenCaptureStore(self.database) as store:
                entries = [entry for task in tasks for entry in two_turns(f"{task}-0")]
                await asyncio.gather(*map(store.put, entries))
                for task in incomplete:
                    await store.mark_incomplete(f"{task}-0", "b", reasons.LOST_STREAM)

        asyncio.run(put())

    def write(self, *lines: dict[str, Any] | str | bytes) -> None:
        self.rollouts.write_bytes(b"".join(as_line(line) for line in lines))

    def finalize(self, *options: object, stdin: bytes = b"") -> subprocess.CompletedProcess[str]:
        source = "-" if stdin else self.rollouts
        arguments = ["finalize", source, "--database", self.database, "--output", self.output, *options]
        return self.tokcap(*arguments, stdin=stdin)

    def summary(self, *options: object) -> dict[str, Any]:
        finished = self.finalize("--json", *options)
        assert "Traceback" not in finished.stderr, finished.stderr
        return {**json.loads(finished.stdout), "code": finished.returncode}

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_bytes().splitlines()]

    def states(self) -> dict[str, tuple[str, str | None]]:
        listed = json.loads(self.tokcap("ls", "-d", self.database, "--json", "-n", 1000).stdout)
        return {rollout["rollout_id"]: (rollout["state"], rollout["outcome"]) for rollout in listed}


def as_line(line: dict[str, Any] | str | bytes) -> bytes:
    if isinstance(line, dict):
        line = json.dumps(line)
    return (line.encode() if isinstance(line, str) else line) + b"\n"


@contextlib.contextmanager
def running(bench: Bench, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """The installed command, reading a pipe that stays open."""
    command = [str(TOKCAP), "finalize", "-", "-d", str(bench.database), "-o", str(bench.output), *options]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=clean_environment()) as process:
        try:
            yield process
        finally:
            process.kill()


def feed_and_wait(
    bench: Bench, process: subprocess.Popen[bytes], tasks: Sequence[int], into: Path | None = None
) -> None:
    output = into or bench.output
    assert process.stdin is not None
    process.stdin.write(b"".join(as_line(record(task)) for task in tasks))
    process.stdin.flush()
    deadline = time.monotonic() + 30
    while not output.exists() or len(output.read_bytes().splitlines()) < len(tasks):
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
