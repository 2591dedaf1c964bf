"""The command line of ``scripts/torture``: run, check, report."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from token_id_capture.store import StoreWarning, TokenCaptureStore
from torturing.check import Findings, check
from torturing.plan import Plan, Round
from torturing.supervise import Supervisor
from torturing.tamper import self_test

_SHOWN = {
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
# What each mode has of the time when all are run.
_SHARES = {"kills": 0.4, "roles": 0.35, "disk": 0.25}


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
            **{kind: self.counts[kind] for kind in _SHOWN},
            "lost": self.of("lost"),
            "torn": self.of("torn"),
            **{name.replace(" ", "_"): number for name, number in sorted(self.counts.items()) if name not in _SHOWN},
            "violations": [f"{kind}: {what}" for kind, what in self.violations],
        }

    def print(self) -> None:
        print(f"seed {self.seed}, {self.seconds:.1f} s, {self.rounds} rounds")
        rows = {"kills (SIGKILL)": self.kills, **{name: self.counts[kind] for kind, name in _SHOWN.items()}}
        for name, number in {**rows, "lost": self.of("lost"), "torn": self.of("torn")}.items():
            print(f"  {name:<30} {number:>12,}")
        for name, number in sorted(self.counts.items()):
            if name not in (*_SHOWN, "dropping"):
                print(f"  {name:<30} {number:>12,}")
        for kind, what in self.violations[:_MOST_SHOWN]:
            print(f"VIOLATION {kind}: {what}")
        if len(self.violations) > _MOST_SHOWN:
            print(f"... and {len(self.violations) - _MOST_SHOWN} more")


def main(description: str) -> int:
    """Run the command; the exit code is 1 if anything was violated, 2 if it could not run."""
    arguments = _parse(description)
    directory: Path = arguments.database.absolute()
    if not (_is_ours(directory) if arguments.check_only else _prepare(directory)):
        wanted = "the directory of an earlier run" if arguments.check_only else "an empty directory"
        print(f"torture: {directory} is something else: name {wanted}", file=sys.stderr)
        return 2
    plan = Plan(
        directory=directory,
        seconds=arguments.seconds,
        writers=arguments.writers,
        seed=arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(2**32),
        coroutines=arguments.coroutines,
        kills_per_second=arguments.kills_per_second,
        round_seconds=arguments.round_seconds,
    )
    # Of a log that the reader pins, and of SQLite's age: both are meant to be so here.
    warnings.simplefilter("ignore", StoreWarning)
    report = Report(plan.seed)
    if arguments.check_only:
        report.add(check(plan.database, plan.ledgers))
    elif arguments.self_test:
        report.add(self_test(plan))
    else:
        _run_modes(plan, report, arguments.mode)
    if arguments.json:
        print(json.dumps(report.as_json()))
    else:
        report.print()
    return 1 if report.violations else 0


def _run_modes(plan: Plan, report: Report, mode: str) -> None:
    """Each mode for its share of the time, until something is violated or the user interrupts."""
    began = time.monotonic()
    interrupted = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal interrupted
        interrupted = True

    signal.signal(signal.SIGINT, interrupt)
    for name, share in _SHARES.items():
        if mode not in ("all", name) or interrupted or report.violations:
            continue
        seconds = plan.seconds * (share if mode == "all" else 1.0)
        if name == "kills":
            _torture(replace(plan, seconds=seconds), report, lambda: interrupted)
        elif name == "roles":
            from torturing.roles import Roles

            report.add(Roles(plan, plan.directory / "roles").run(seconds, lambda: interrupted))
        else:
            from torturing.disk import run_disk

            report.add(run_disk(plan, plan.directory / "disk", seconds, lambda: interrupted))
        report.seconds = time.monotonic() - began


def _torture(plan: Plan, report: Report, interrupted: Callable[[], bool]) -> None:
    supervisor = Supervisor.of(plan)
    began = time.monotonic()

    def goes_on() -> bool:
        return time.monotonic() - began < plan.seconds and not (supervisor.stopped or interrupted())

    with _progress(plan, supervisor) as tick:
        while not report.rounds or goes_on():
            part = Round(plan, report.rounds, time.monotonic())
            supervisor.run(part, min(plan.round_seconds, began + plan.seconds - time.monotonic()), tick)
            findings = check(plan.database, plan.ledgers)
            findings.violations.extend(("error", accident) for accident in supervisor.accidents)
            report.add(findings)
            report.kills, report.seconds = supervisor.kills, time.monotonic() - began
            if report.violations:
                print(f"torture: database and ledger are kept in {plan.directory}", file=sys.stderr)
                return
            if goes_on():
                _clear(plan)


def _clear(plan: Plan) -> None:
    """Forget a round that was found sound; the next one uses the same file."""

    async def delete_all() -> None:
        async with TokenCaptureStore(plan.database) as store:
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


def _is_ours(directory: Path) -> bool:
    return (directory / "ledger").is_dir()


def _prepare(directory: Path) -> bool:
    """Make the directory, or empty one of an earlier run; False if it is neither empty nor ours."""
    if _is_ours(directory):
        shutil.rmtree(directory)
    elif directory.exists() and any(directory.iterdir()):
        return False
    (directory / "ledger").mkdir(parents=True)
    return True


def _parse(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", type=Path, required=True, metavar="DIR", help="an empty directory for the run")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default 60)")
    parser.add_argument("--writers", type=int, default=4, help="writer processes (default 4)")
    parser.add_argument("--coroutines", type=int, default=200, help="coroutines of each writer (default 200)")
    parser.add_argument("--kills-per-second", type=float, default=10.0, help="SIGKILLs a second (default 10)")
    parser.add_argument("--round-seconds", type=float, default=30.0, help="check after so long (default 30)")
    parser.add_argument("--seed", type=int, help="of the random choices; printed at the end")
    parser.add_argument(
        "--mode",
        choices=("all", *_SHARES),
        default="all",
        help="kills: of writers, whose ledger is compared; roles: of every command and server as well; "
        "disk: errors and losses of power (default all)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--self-test", action="store_true", help="instead, damage a small database and see it found")
    instead.add_argument("--check-only", action="store_true", help="instead, check what an earlier run has left")
    return parser.parse_args()
