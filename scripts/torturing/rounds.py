"""Rounds of writers that are killed, each checked by itself, and what all rounds together found."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from token_id_capture.store import TokenCaptureStore
from torturing.check import Findings, check
from torturing.plan import Plan, Round
from torturing.supervise import Supervisor

SHOWN = {
    "put": "acknowledged puts",
    "begin": "acknowledged begins",
    "refuse": "acknowledged refusals",
    "mark": "acknowledged marks",
    "conflict": "conflicts refused and flagged",
    "freeze": "freezes",
    "drop": "answered drops",
    "frozen": "refused because frozen",
    "retired": "refused because retired",
}
_MOST_SHOWN = 20


@dataclass(slots=True)
class Report:
    """The sum of all rounds."""

    seed: int
    seconds: float = 0.0
    rounds: int = 0
    kills: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[tuple[str, str]] = field(default_factory=list)

    def add(self, findings: Findings) -> None:
        self.rounds += 1
        self.counts.update(findings.counts)
        self.violations.extend(findings.violations)

    def of(self, kind: str) -> int:
        return sum(1 for found, _ in self.violations if found == kind)

    def as_json(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "rounds": self.rounds,
            "kills": self.kills,
            **{kind: self.counts[kind] for kind in SHOWN},
            "lost": self.of("lost"),
            "torn": self.of("torn"),
            **{name.replace(" ", "_"): number for name, number in sorted(self.counts.items()) if name not in SHOWN},
            "violations": [f"{kind}: {what}" for kind, what in self.violations],
        }

    def print(self) -> None:
        print(f"seed {self.seed}, {self.seconds:.1f} s, {self.rounds} rounds")
        rows = {"kills (SIGKILL)": self.kills, **{name: self.counts[kind] for kind, name in SHOWN.items()}}
        for name, number in {**rows, "lost": self.of("lost"), "torn": self.of("torn")}.items():
            print(f"  {name:<30} {number:>12,}")
        for name, number in sorted(self.counts.items()):
            if name not in (*SHOWN, "dropping"):
                print(f"  {name:<30} {number:>12,}")
        for kind, what in self.violations[:_MOST_SHOWN]:
            print(f"VIOLATION {kind}: {what}")
        if len(self.violations) > _MOST_SHOWN:
            print(f"... and {len(self.violations) - _MOST_SHOWN} more")


def torture(
    plan: Plan,
    report: Report,
    stopped: Callable[[], bool],
    *,
    compare: Callable[[Plan], Findings] = lambda plan: check(plan.database, plan.ledgers),
    strike: Callable[[], str] | None = None,
) -> None:
    """Kill writers for the time of the plan, and ``strike`` the server that they write to, if there is one."""
    supervisor = Supervisor.of(plan, strike)
    began, kills_before = time.monotonic(), report.kills
    first = True

    def goes_on() -> bool:
        return time.monotonic() - began < plan.seconds and not (supervisor.stopped or stopped())

    with _progress(plan, supervisor) as tick:
        while first or goes_on():
            first = False
            part = Round(plan, report.rounds, time.monotonic())
            supervisor.run(part, min(plan.round_seconds, began + plan.seconds - time.monotonic()), tick)
            findings = compare(plan)
            findings.violations.extend(("error", accident) for accident in supervisor.accidents)
            report.add(findings)
            report.kills, report.seconds = kills_before + supervisor.kills, time.monotonic() - began
            if report.violations:
                print(f"torture: database and ledger are kept in {plan.directory}", file=sys.stderr)
                break
            if goes_on():
                _clear(plan)
    report.counts.update(supervisor.strikes)


def _clear(plan: Plan) -> None:
    """Forget a round that was found sound; the next one uses the same database."""

    async def delete_all() -> None:
        async with TokenCaptureStore(plan.target) as store:
            while page := await store.list_rollouts(limit=500):
                await store.delete([rollout.rollout_id for rollout in page])

    asyncio.run(delete_all())
    for ledger in plan.ledgers.glob("*.ledger"):
        ledger.unlink()


@contextmanager
def _progress(plan: Plan, supervisor: Supervisor) -> Iterator[Callable[[], None]]:
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    # Without a thread of its own: this process forks.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as progress:
        task = progress.add_task("torture", total=plan.seconds)
        began = time.monotonic()

        def tick() -> None:
            done = f"{supervisor.kills:,} kills, {supervisor.steps:,} operations"
            progress.update(task, completed=time.monotonic() - began, description=done, refresh=True)

        yield tick
