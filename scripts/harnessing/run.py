"""One task of one harness: engine, gateway, program, and what was captured."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from harnessing.programs import Harness, Place, environment_of
from harnessing.script import ANSWER, TWO_AGENTS, ScriptedPolicy
from token_id_capture.consumer import trajectories_from_source
from token_id_capture.lifecycle import MAIN_AGENT
from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore
from token_id_capture.testing.engine import PolicyEngine
from token_id_capture.testing.serving import engine_in_thread
from token_id_capture.testing.template import Habits

_TASK: Final = "What does notes.txt say, and how many bytes is it?"
_SECONDS: Final = 180
_ROLLOUT: Final = "task"


@dataclass(frozen=True)
class Result:
    """``problems`` is empty if all is as it should be."""

    harness: str
    calls: int
    agents: dict[str, int]
    problems: list[str]
    output: str


def run(harness: Harness, programs: Path, *, two_agents: bool = False, history: str | None = None) -> Result:
    """Have a harness do a task, and compare what was captured with what the engine served."""
    habits = Habits(reasoning=True, keeps_reasoning=True)
    engine = PolicyEngine(ScriptedPolicy(), max_model_len=2**20, habits=habits)
    with tempfile.TemporaryDirectory() as folder, engine_in_thread(engine) as upstream:
        database = Path(folder) / "captures.db"
        place = _place(Path(folder), programs)
        with _gateway(upstream, database, history or harness.history) as address:
            place = Place(f"{address}/ng-rollout/{_ROLLOUT}/training-token-capture", *_rest(place))
            task = f"{TWO_AGENTS}: {_TASK}" if two_agents else _TASK
            done = subprocess.run(
                harness.prepare(place, task),
                cwd=place.workspace,
                env=environment_of(harness, place),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                check=False,
            )
        entries, flags = asyncio.run(_captured(database))
    output = done.stdout + done.stderr
    problems = list(_problems(done.returncode, done.stdout, engine, entries, flags))
    agents = Counter(entry.agent or MAIN_AGENT for entry in entries)
    return Result(harness.name, len(entries), dict(agents), problems, output)


def _problems(
    code: int, output: str, engine: PolicyEngine, entries: tuple[TokenEntry, ...], flags: list[str]
) -> Iterator[str]:
    if code:
        yield f"the harness ended with exit code {code}"
    if ANSWER not in output:
        yield "the harness did not give the scripted answer"
    # The gateway itself asks for one token, to see what the template takes.
    served = sum(call.body.get("max_tokens") != 1 for call in engine.calls)
    if len(entries) != served:
        yield f"{served} calls reached the engine, and {len(entries)} were captured"
    yield from flags
    roots = Counter(entry.agent or MAIN_AGENT for entry in entries if _is_root(entry, entries) and entry.offers_tools)
    yield from (f"agent {agent} has {count} roots" for agent, count in roots.items() if count > 1)


def _is_root(entry: TokenEntry, entries: tuple[TokenEntry, ...]) -> bool:
    return not any(
        other is not entry and entry.prompt_token_ids.startswith(other.prompt_token_ids, other.generation_token_ids)
        for other in entries
    )


async def _captured(database: Path) -> tuple[tuple[TokenEntry, ...], list[str]]:
    async with TokenCaptureStore(database) as store:
        entries = await store.read_entries(_ROLLOUT)
        if not entries:
            return (), ["no call was captured"]
        detail = await store.describe_rollout(_ROLLOUT)
        flags = [f"flag {flag.reason}: {flag.detail}" for flag in detail.flags]
        built = await trajectories_from_source(_ROLLOUT, store)
    if built["mask_sample"]:
        flags += [f"the rollout is masked: {reason}" for reason in built["reasons"]]
    return entries, flags + [f"call {it.model_call_id} is open" for it in detail.intents if it.outcome is None]


def _place(folder: Path, programs: Path) -> Place:
    home, workspace = folder / "home", folder / "workspace"
    home.mkdir()
    workspace.mkdir()
    (workspace / "notes.txt").write_text("alpha\n")
    subprocess.run(["git", "init", "-q"], cwd=workspace, check=True)
    return Place("", home, workspace, programs)


def _rest(place: Place) -> tuple[Path, Path, Path]:
    return place.home, place.workspace, place.programs


@contextmanager
def _gateway(upstream: str, database: Path, history: str) -> Iterator[str]:
    tokcap = Path(sys.executable).with_name("tokcap")
    arguments = ["-u", upstream, "-d", str(database), "--port", "0", "--engine", "vllm", "--model", "policy"]
    command = [str(tokcap), "serve", *arguments, "--no-check", "--history", history, "--chat-history", history]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ})
    assert process.stderr is not None
    said: list[str] = []
    try:
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"listening on (http://\S+)", line):
                break
        else:
            raise RuntimeError(f"the gateway did not start: {''.join(said)}")
        yield found[1]
    finally:
        process.terminate()
        process.communicate(timeout=60)
