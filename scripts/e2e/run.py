"""One run: engine, tap and gateway up; agents play; rollouts are finalized; everything is compared."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from e2e import check
from e2e.agents import Agent, Attempt
from e2e.cache import Cache, CannotRunError
from e2e.engine import Engine
from e2e.findings import Findings
from e2e.outage import check_outage
from e2e.progress import Phases
from e2e.responses import Json
from e2e.services import DRAIN_SECONDS, TOKCAP, engine_started, gateway_started
from e2e.stories import REPEATED, Story, stories
from e2e.tap import Tap, tapped
from e2e.witness import Outcome, by_rollout
from token_id_capture.store import TokenCaptureStore

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
        self._rows = settings.folder / "rows.jsonl"
        self._gateway_log = settings.folder / "gateway.log"

    async def run(self) -> Findings:
        """Play and compare.

        Raises:
            CannotRunError: the engine or the gateway did not start, or a command failed.
        """
        settings, phase = self._settings, self._phases.phase
        plan = stories(settings.rollouts, settings.seed, self._engine.kinds, self._engine.acts)
        async with (
            engine_started(self._engine, self._cache, settings.folder, self._phases) as server,
            tapped(server.port) as tap,
            gateway_started(self._engine, tap, self._database, settings.workers, self._gateway_log) as gateway_url,
        ):
            url = f"http://127.0.0.1:{server.port}"
            attempts = await self._play(plan, gateway_url)
            with phase("compare", "compare entries and replies with the wire"):
                outcomes = await self._compare_captures(attempts, tap, url)
            with phase("finalize", "tokcap finalize --retire"):
                rows = await self._finalize(plan)
                check.check_rows(outcomes, rows, self._findings)
                await self._check_retired(rows)
            await self._score([row for row in rows if not row["mask_sample"]], url)
            with phase("reference", "score the rows with another implementation"):
                await asyncio.to_thread(self._compare_with_reference)
            with phase("outage", "kill the engine under calls"):
                await check_outage(self._engine, server, tap, gateway_url, self._database, self._findings)
        self._check_log()
        return self._findings

    async def _play(self, plan: Sequence[Story], gateway_url: str) -> list[Attempt]:
        """Let all agents play, so many at a time; returns every request that they made."""
        turn = asyncio.Semaphore(self._settings.agents)
        agents: list[Agent] = []

        async def play(story: Story) -> None:
            base_url = f"{gateway_url}/ng-rollout/{story.rollout_id}/training-token-capture"
            agent = Agent(story, base_url, self._engine)
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

    async def _compare_captures(self, attempts: list[Attempt], tap: Tap, url: str) -> dict[str, Outcome]:
        """Compare what is stored, and what clients saw, with the wire; returns what must come out."""
        findings = self._findings
        async with TokenCaptureStore(self._database, create=False) as store:
            await _until_drained(store, findings)
            async with aiohttp.ClientSession() as session:
                exchanges = tap.exchanges()
                witness, generations = await check.witnessed(self._engine, session, url, exchanges, findings)
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
        return {rollout_id: witness.outcome(made) for rollout_id, made in by_rollout(attempts).items()}

    async def _finalize(self, plan: Sequence[Story]) -> list[Json]:
        """The rows that the command writes of all rollouts."""
        folder = self._settings.folder
        records, rows = folder / "rollouts.jsonl", self._rows
        lines = [json.dumps({"_ng_rollout_id": story.rollout_id, "reward": 1.0}) for story in plan]
        records.write_text("".join(f"{line}\n" for line in lines), "utf-8")
        command = [
            *TOKCAP, "finalize", str(records), "--database", str(self._database), "--output", str(rows),
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

    def _compare_with_reference(self) -> None:
        differences = self._engine.reference_differences(self._cache, self._rows)
        self._findings.reference_differences = differences
        largest = max(differences, default=0.0)
        self._findings.expect(largest <= self._engine.tolerance, "reference", f"log probabilities off by {largest:g}")

    def _check_log(self) -> None:
        text = self._gateway_log.read_text("utf-8")
        self._findings.expect("Traceback" not in text, "gateway", f"a traceback in {self._gateway_log}")


async def _until_drained(store: TokenCaptureStore, findings: Findings) -> None:
    """Wait until the engine has finished what clients hung up on."""
    end = time.monotonic() + DRAIN_SECONDS
    while True:
        summaries = await store.list_rollouts(limit=100_000)
        still_open = {one.rollout_id: one.open_intents - one.flags for one in summaries if one.open_intents > one.flags}
        if not still_open or time.monotonic() > end:
            findings.expect(not still_open, "intents", f"still open: {still_open}")
            return
        await asyncio.sleep(0.2)
