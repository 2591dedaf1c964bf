"""The command: install, enter a namespace without a network, run, report."""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from e2e.cache import Cache, CannotRunError, default_cache
from e2e.vllm import Vllm

from harnessing.programs import HARNESSES, Harness, install
from harnessing.real import run_real
from harnessing.run import Result, run, run_closed

_INSIDE: Final = "TOKCAP_HARNESSES_INSIDE"
_OUTPUT_SHOWN: Final = 2000


def main(description: str) -> int:
    """Run the script; returns its exit code."""
    options = _options(description)
    cache = options.cache.absolute()
    if os.environ.get(_INSIDE) != "1":
        try:
            install(cache)
            if options.vllm:
                Vllm().install(Cache(options.vllm_cache))
        except (OSError, subprocess.CalledProcessError, CannotRunError) as error:
            sys.stderr.write(f"what is to be run could not be installed: {error}\n")
            return 2
        # Nothing that a harness does reaches anything but this machine.
        inside = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
        os.environ[_INSIDE] = "1"
        os.execvp("unshare", [*inside, sys.executable, *sys.argv])
    chosen = [harness for harness in HARNESSES if not options.only or harness.name in options.only]
    chosen = [harness for harness in chosen if harness.compacts or not options.compaction]
    if options.vllm:
        try:
            passed = asyncio.run(run_real(chosen, cache, Cache(options.vllm_cache), _report))
        except CannotRunError as error:
            sys.stderr.write(f"{error}\n")
            return 2
    else:
        passed = [_report(_scripted(harness, cache, options)) for harness in chosen]
    return 0 if passed and all(passed) else 1


def _scripted(harness: Harness, cache: Path, options: argparse.Namespace) -> Result:
    if options.closed:
        return run_closed(harness, cache)
    return run(harness, cache, two_agents=options.two_agents, compaction=options.compaction, history=options.history)


def _options(description: str) -> argparse.Namespace:
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "token-id-capture" / "harnesses"
    made.add_argument(
        "--cache", type=Path, default=default, metavar="DIR", help="where they are installed (%(default)s)"
    )
    made.add_argument("--only", action="append", choices=[harness.name for harness in HARNESSES], help="run this one")
    made.add_argument("--two-agents", action="store_true", help="a task for which two more agents are started at once")
    made.add_argument(
        "--compaction", action="store_true", help="compact the history in between: Claude Code and Codex alone"
    )
    made.add_argument("--closed", action="store_true", help="call for a rollout that was frozen (410)")
    made.add_argument("--vllm", action="store_true", help="with a real vLLM and its tiny model (3.5 GB, once)")
    made.add_argument(
        "--vllm-cache", type=Path, default=default_cache(), metavar="DIR", help="where it is installed (%(default)s)"
    )
    made.add_argument(
        "--history", choices=("exact", "full", "off"), help="of tokcap serve (full for OpenHands, else exact)"
    )
    return made.parse_args()


def _report(result: Result) -> bool:
    """Say how a task ended; returns whether all is as it should be."""
    agents = ", ".join(f"{agent} {count}" for agent, count in result.agents.items())
    outcome = "pass" if not result.problems else "FAIL"
    sys.stdout.write(f"{outcome}  {result.harness}: {result.calls} calls captured ({agents or 'no agent'})\n")
    for problem in result.problems:
        sys.stdout.write(f"      {problem}\n")
    if result.problems:
        sys.stdout.write("      " + result.output[-_OUTPUT_SHOWN:].replace("\n", "\n      ") + "\n")
    sys.stdout.flush()
    return not result.problems
