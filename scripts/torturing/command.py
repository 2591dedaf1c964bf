"""The command line of ``scripts/torture``: run, check, report."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

from token_id_capture.store import StoreWarning
from torturing.check import check
from torturing.plan import Plan
from torturing.rounds import Report, torture
from torturing.tamper import self_test

# What each mode has of the time when all are run.
_SHARES = {"kills": 0.3, "roles": 0.25, "disk": 0.15, "server": 0.3}


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
            torture(replace(plan, seconds=seconds), report, lambda: interrupted)
        elif name == "roles":
            from torturing.roles import Roles

            report.add(Roles.on_a_file(plan, plan.directory / "roles").run(seconds, lambda: interrupted))
        elif name == "disk":
            from torturing.disk import run_disk

            report.add(run_disk(plan, plan.directory / "disk", seconds, lambda: interrupted))
        else:
            from torturing.server import run_server

            run_server(plan, report, seconds, lambda: interrupted)
        report.seconds = time.monotonic() - began


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
        "disk: errors and losses of power; server: of writers, gateways and PostgreSQL itself (default all)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--self-test", action="store_true", help="instead, damage a small database and see it found")
    instead.add_argument("--check-only", action="store_true", help="instead, check what an earlier run has left")
    return parser.parse_args()
