"""One task of one harness: engine, gateway, program, and what was captured."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from urllib.request import urlopen

from harnessing.programs import Harness, Place, environment_of
from harnessing.script import ANSWER, TWO_AGENTS, OneLongPrompt, ScriptedPolicy
from token_id_capture.builder.attribution import ScoredAnswer
from token_id_capture.builder.causes import Cause
from token_id_capture.lifecycle import MAIN_AGENT, Sequences
from token_id_capture.rebuild import build_snapshot
from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore
from token_id_capture.testing.engine import PolicyEngine
from token_id_capture.testing.serving import engine_in_thread
from token_id_capture.testing.template import Habits

TASK: Final = "What does notes.txt say, and how many bytes is it?"
_SECONDS: Final = 180
ROLLOUT: Final = "task"


@dataclass(frozen=True)
class Result:
    """``problems`` is empty if all is as it should be."""

    harness: str
    calls: int
    agents: dict[str, int]
    problems: list[str]
    output: str


def run(
    harness: Harness, programs: Path, *, two_agents: bool = False, compaction: bool = False, history: str | None = None
) -> Result:
    """Have a harness do a task, and compare what was captured with what the engine served.

    With ``compaction`` the engine finds one prompt too long, as soon as it holds two tool results.
    """
    habits = Habits(reasoning=True, keeps_reasoning=True)
    limit = OneLongPrompt(most=1 if compaction else 0)
    engine = PolicyEngine(ScriptedPolicy(at_length=compaction), max_model_len=2**20, habits=habits, on_call=limit)
    with tempfile.TemporaryDirectory() as folder, engine_in_thread(engine) as upstream:
        database = Path(folder) / "captures.db"
        place = place_in(Path(folder), programs, compaction)
        with gateway(upstream, database, history or harness.history) as address:
            task = f"{TWO_AGENTS}: {TASK}" if two_agents else TASK
            code, output = ended(harness, place, address, task)
        entries, flags = asyncio.run(_captured(database, compaction))
    problems = list(_problems(code, output, engine, limit, entries, flags))
    # A history that was compacted is a root of its own.
    problems += _roots(entries, most=2 if compaction else 1)
    agents = Counter(entry.agent or MAIN_AGENT for entry in entries)
    return Result(harness.name, len(entries), dict(agents), problems, output)


def run_closed(harness: Harness, programs: Path) -> Result:
    """Have a harness call for a rollout that was frozen: it must end soon, and nothing may be generated."""
    engine = PolicyEngine(ScriptedPolicy())
    with tempfile.TemporaryDirectory() as folder, engine_in_thread(engine) as upstream:
        database = Path(folder) / "captures.db"
        place = place_in(Path(folder), programs)
        asyncio.run(_close(database))
        with gateway(upstream, database, harness.history) as address:
            begun = time.monotonic()
            code, output = ended(harness, place, address)
            spent = time.monotonic() - begun
            with urlopen(f"{address}/metrics") as answer:
                [calls] = re.findall(r'tokcap_calls_total\{outcome="closed".*\} (\d+)', answer.read().decode())
    problems = [] if code is not None else [f"it had not ended after {_SECONDS} s"]
    if any(call.body.get("max_tokens") != 1 for call in engine.calls):
        problems.append("a call of a closed rollout reached the engine")
    return Result(f"{harness.name}: given up after {calls} calls, {spent:.0f} s", 0, {}, problems, output)


async def _close(database: Path) -> None:
    """Freeze the rollout, which some call must have begun."""
    async with TokenCaptureStore(database) as store:
        await store.begin_call(ROLLOUT, "earlier")
        await store.refuse_call(ROLLOUT, "earlier")
        await store.freeze(ROLLOUT)


def ended(
    harness: Harness, place: Place, gateway: str, task: str = TASK, *, seconds: float = _SECONDS
) -> tuple[int | None, str]:
    """Have a harness do a task; its exit code, None if it had to be killed after ``seconds``, and what it wrote."""
    place = replace(place, base=f"{gateway}/ng-rollout/{ROLLOUT}/training-token-capture")
    command, environment = harness.prepare(place, task), environment_of(harness, place)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as written:
        process = subprocess.Popen(
            command, cwd=place.workspace, env=environment, stdin=subprocess.DEVNULL, stdout=written, stderr=written
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
        written.seek(0)
        return code, written.read()


def _problems(
    code: int | None,
    output: str,
    engine: PolicyEngine,
    limit: OneLongPrompt,
    entries: tuple[TokenEntry, ...],
    flags: list[str],
) -> Iterator[str]:
    if code is None:
        yield f"the harness had not ended after {_SECONDS} s"
    elif code:
        yield f"the harness ended with exit code {code}"
    if ANSWER not in output:
        yield "the harness did not give the scripted answer"
    # The gateway itself asks for one token, to see what the template takes.
    served = sum(call.body.get("max_tokens") != 1 for call in engine.calls) - limit.refused
    if len(entries) != served:
        yield f"{served} calls reached the engine, and {len(entries)} were captured"
    yield from flags


def _roots(entries: tuple[TokenEntry, ...], most: int) -> Iterator[str]:
    roots = Counter(entry.agent or MAIN_AGENT for entry in entries if _is_root(entry, entries) and entry.offers_tools)
    yield from (f"agent {agent} has {count} roots" for agent, count in roots.items() if count > most)


def _is_root(entry: TokenEntry, entries: tuple[TokenEntry, ...]) -> bool:
    return not any(
        other is not entry and entry.prompt_token_ids.startswith(other.prompt_token_ids, other.generation_token_ids)
        for other in entries
    )


async def _captured(database: Path, compaction: bool) -> tuple[tuple[TokenEntry, ...], list[str]]:
    async with TokenCaptureStore(database) as store:
        entries = await store.read_entries(ROLLOUT)
        if not entries:
            return (), ["no call was captured"]
        detail = await store.describe_rollout(ROLLOUT)
        flags = [f"flag {flag.reason}: {flag.detail}" for flag in detail.flags]
        snapshot = await store.freeze(ROLLOUT)
    # What a finished record says of the response whose reward it holds.
    scored = ScoredAnswer(transcript=({"role": "user", "content": TASK}, {"role": "assistant", "content": ANSWER}))
    build = build_snapshot(snapshot, sequences=Sequences.ALL, scored=scored if compaction else None)
    flags += [f"the rollout is masked: {reason}" for reason in build.reasons if not build.deliverable]
    flags += [
        f"the sequence of {one.agent} (cause {one.cause}) is masked: {reason}"
        for one in build.sequences
        for reason in one.reasons
    ]
    if compaction and not any(one.cause is Cause.COMPACTION for one in build.sequences):
        flags.append("no sequence begins after a compaction")
    return entries, flags + [f"call {it.model_call_id} is open" for it in detail.intents if it.outcome is None]


def place_in(folder: Path, programs: Path, compacts: bool = False) -> Place:
    """A home and a workspace for one task."""
    home, workspace = folder / "home", folder / "workspace"
    home.mkdir()
    workspace.mkdir()
    (workspace / "notes.txt").write_text("alpha\n")
    subprocess.run(["git", "init", "-q"], cwd=workspace, check=True)
    return Place("", home, workspace, programs, compacts)


@contextmanager
def gateway(upstream: str, database: Path, history: str, *, more: Sequence[str] = ()) -> Iterator[str]:
    """``tokcap serve`` in front of an engine; gives its address."""
    tokcap = Path(sys.executable).with_name("tokcap")
    arguments = ["-u", upstream, "-d", str(database), "--port", "0", "--engine", "vllm", "--model", "policy", *more]
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
