"""One run: engine, tap and gateway up; agents play; rollouts are finalized; everything is compared."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
import warnings
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from e2e import check
from e2e.agents import MODEL, Agent, Attempt
from e2e.cache import Cache, CannotRunError
from e2e.engine import Engine
from e2e.findings import Findings
from e2e.progress import Phases
from e2e.replies import Json
from e2e.server import running
from e2e.stories import REPEATED, Story, stories
from e2e.tap import Tap, tapped
from e2e.witness import Verdict, by_rollout
from token_id_capture.store import TokenCaptureStore, WalResetBugWarning

_TOKCAP = (sys.executable, "-m", "token_id_capture")
_LISTENING = re.compile(r"listening on (http://\S+)")
_GATEWAY_SECONDS = 60
_DRAIN_SECONDS = 120
_TEETH = 20


@dataclass(frozen=True)
class Settings:
    """How much is played, and where its files are."""

    rollouts: int
    agents: int
    workers: int
    seed: int
    folder: Path


class Run:
    """The whole proof, once."""

    def __init__(self, engine: Engine, cache: Cache, settings: Settings, phases: Phases) -> None:
        self._engine = engine
        self._cache = cache
        self._settings = settings
        self._phases = phases
        self._findings = Findings()
        self._database = settings.folder / "captures.db"
        # Said once by the gateway; here the same file is only read.
        warnings.simplefilter("ignore", WalResetBugWarning)

    async def run(self) -> Findings:
        """Play and compare.

        Raises:
            CannotRunError: the engine or the gateway did not start, or a command failed.
        """
        settings, phase = self._settings, self._phases.phase
        plan = stories(settings.rollouts, settings.seed, self._engine.kinds, self._engine.acts)
        async with self._engine_started() as port, tapped(port) as tap, self._gateway_started(tap) as gateway_url:
            attempts = await self._play(plan, gateway_url)
            with phase("compare", "compare entries and replies with the wire"):
                verdicts = await self._compare_captures(attempts, tap)
            with phase("finalize", "tokcap finalize --retire"):
                rows = await self._finalize(plan)
                check.check_rows(verdicts, rows, self._findings)
                await self._check_retired(rows)
            await self._score([row for row in rows if not row["mask_sample"]], f"http://127.0.0.1:{port}")
        self._check_log()
        return self._findings

    @asynccontextmanager
    async def _engine_started(self) -> AsyncIterator[int]:
        async with AsyncExitStack() as stack:
            with self._phases.phase("engine start", f"start {self._engine.name}"):
                port = await stack.enter_async_context(self._engine.running(self._cache, self._settings.folder))
            with self._phases.phase("first request", "its first request"):
                await _warm_up(f"http://127.0.0.1:{port}")
            yield port

    @asynccontextmanager
    async def _gateway_started(self, tap: Tap) -> AsyncIterator[str]:
        """``tokcap serve`` with several workers, behind it the tap."""
        command: list[str | Path] = [
            *_TOKCAP, "serve", "--upstream", f"http://127.0.0.1:{tap.port}/v1", "--engine", self._engine.option,
            "--database", self._database, "--port", "0", "--workers", str(self._settings.workers),
        ]  # fmt: skip
        environment = {"TOKCAP_DRAIN_SECONDS": str(_DRAIN_SECONDS), "TOKCAP_LOG_PROBS_MODE": "raw_logprobs"}
        async with running("tokcap serve", command, self._gateway_log, environment) as server:
            await server.until(lambda: _LISTENING.search(self._gateway_log.read_text("utf-8")), _GATEWAY_SECONDS)
            match = _LISTENING.search(self._gateway_log.read_text("utf-8"))
            assert match is not None
            yield match[1]

    @property
    def _gateway_log(self) -> Path:
        return self._settings.folder / "gateway.log"

    async def _play(self, plan: Sequence[Story], gateway_url: str) -> list[Attempt]:
        """Let all agents play, so many at a time; returns every request that they made."""
        turn = asyncio.Semaphore(self._settings.agents)
        agents: list[Agent] = []

        async def play(story: Story) -> None:
            base_url = f"{gateway_url}/ng-rollout/{story.rollout_id}/training-token-capture"
            agent = Agent(story, base_url, self._engine.asking, self._engine.refused)
            agents.append(agent)
            async with turn:
                await agent.play()
            self._phases.advance()

        with self._phases.phase("play", f"play {len(plan)} rollouts", total=len(plan)):
            async with asyncio.TaskGroup() as group:
                for story in plan:
                    group.create_task(play(story))
        attempts = [attempt for agent in agents for attempt in agent.attempts]
        for problem in (problem for agent in agents for problem in agent.problems):
            self._findings.expect(False, "agent", problem)
        self._findings.counts.update(
            rollouts=len(plan),
            calls=len(attempts),
            streamed=sum(attempt.streamed for attempt in attempts),
            retried=sum(turn.act in REPEATED for story in plan for turn in story.turns),
            hang_ups=sum(attempt.hung_up for attempt in attempts),
        )
        return attempts

    async def _compare_captures(self, attempts: list[Attempt], tap: Tap) -> dict[str, Verdict]:
        """Compare what is stored, and what clients saw, with the wire; returns what must come out."""
        findings = self._findings
        async with TokenCaptureStore(self._database, create=False) as store:
            await _until_drained(store, findings)
            witness, generations = check.witnessed(self._engine, tap.exchanges(), findings)
            summaries = await store.list_rollouts(limit=10 * self._settings.rollouts)
            entries = [entry for summary in summaries for entry in await store.read_entries(summary.rollout_id)]
        check.check_entries(witness, entries, findings)
        check.check_clients(self._engine, attempts, generations, findings)
        findings.counts.update(
            reached_the_engine=len(generations),
            answered_whole=len(witness.said),
            refused=len(witness.refused),
            lost=len(witness.lost),
            not_countable=len(witness.uncountable),
            flags=sum(summary.flags for summary in summaries),
        )
        flagged = sum(summary.flags for summary in summaries)
        unusable = len(witness.lost | witness.uncountable)
        findings.expect(flagged == unusable, "flags", f"{flagged} flags for {unusable} calls that are not whole")
        return {rollout_id: witness.verdict(made) for rollout_id, made in by_rollout(attempts).items()}

    async def _finalize(self, plan: Sequence[Story]) -> list[Json]:
        """The rows that the command writes of all rollouts."""
        folder = self._settings.folder
        records, rows = folder / "rollouts.jsonl", folder / "rows.jsonl"
        lines = [json.dumps({"_ng_rollout_id": story.rollout_id, "reward": 1.0}) for story in plan]
        records.write_text("".join(f"{line}\n" for line in lines), "utf-8")
        command = [
            *_TOKCAP, "finalize", str(records), "--database", str(self._database), "--output", str(rows),
            "--format", "trajectory", "--retire",
        ]  # fmt: skip
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        output, _ = await process.communicate()
        if process.returncode:
            raise CannotRunError(f"tokcap finalize: exit code {process.returncode}\n{output.decode()}")
        return [json.loads(line) for line in rows.read_text("utf-8").splitlines()]

    async def _check_retired(self, rows: Sequence[Json]) -> None:
        """Delivered rollouts are retired; the evidence of masked ones is still there."""
        async with TokenCaptureStore(self._database, create=False) as store:
            states = {one.rollout_id: one.state for one in await store.list_rollouts(limit=10 * len(rows))}
        for row in rows:
            wanted = "frozen" if row["mask_sample"] else "retired"
            state = states.get(row["rollout_id"])
            # A rollout of which no call ever reached the gateway leaves nothing.
            if state is not None or row["mask_reason"] != "nothing_recorded":
                self._findings.expect(state == wanted, "state", f"{row['rollout_id']}: {state}, not {wanted}")

    async def _score(self, rows: Sequence[Json], url: str) -> None:
        """Ask the engine anew for every delivered row, and for falsified ones."""
        with self._phases.phase("score", f"score {len(rows)} rows anew", total=len(rows)):
            async with aiohttp.ClientSession() as session:
                for number, row in enumerate(rows):
                    await check.check_scores(self._engine, session, url, row, self._findings)
                    if number < _TEETH:
                        await check.check_teeth(self._engine, session, url, row, self._findings)
                    self._phases.advance()

    def _check_log(self) -> None:
        text = self._gateway_log.read_text("utf-8")
        self._findings.expect("Traceback" not in text, "gateway", f"a traceback in {self._gateway_log}")


async def _warm_up(url: str) -> None:
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 2}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as reply:
        if reply.status != 200:
            raise CannotRunError(f"the engine's first reply: HTTP {reply.status}: {await reply.text()}")
        await reply.read()


async def _until_drained(store: TokenCaptureStore, findings: Findings) -> None:
    """Wait until the engine has finished what clients hung up on."""
    end = time.monotonic() + _DRAIN_SECONDS
    while True:
        summaries = await store.list_rollouts(limit=100_000)
        still_open = {one.rollout_id: one.open_intents - one.flags for one in summaries if one.open_intents > one.flags}
        if not still_open or time.monotonic() > end:
            findings.expect(not still_open, "intents", f"still open: {still_open}")
            return
        await asyncio.sleep(0.2)
