"""The command of both scripts: install, serve, play, finalize, compare, report."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from e2e.cache import Cache, CannotRunError, default_cache
from e2e.engine import Engine
from e2e.findings import Findings
from e2e.progress import Phases
from e2e.run import Run, Settings

_MISMATCHES_SHOWN = 12
_TEXT_SHOWN = 600


def parser(description: str) -> argparse.ArgumentParser:
    """The options that both scripts have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rollouts", type=int, default=150, metavar="N", help="rollouts to play (%(default)s)")
    made.add_argument("--agents", type=int, default=12, metavar="N", help="rollouts at a time (%(default)s)")
    made.add_argument("--workers", type=int, default=3, metavar="N", help="processes of the gateway (%(default)s)")
    made.add_argument("--seed", type=int, default=1, metavar="N", help="seed of plan and sampling (%(default)s)")
    made.add_argument(
        "--cache", type=Path, default=default_cache(), metavar="DIR", help="where engines are installed (%(default)s)"
    )
    made.add_argument("--keep", type=Path, metavar="DIR", help="keep database, rows and logs here, in a new folder")
    made.add_argument("--json", action="store_true", help="the result as JSON on standard output")
    made.add_argument("--install-only", action="store_true", help="install the engine, and stop")
    return made


def main(options: argparse.Namespace, make_engine: Callable[[argparse.Namespace], Engine]) -> int:
    """Run it. Returns the exit code: 0 all agreed; 1 something did not; 2 it could not run."""
    try:
        return _main(options, make_engine(options))
    except CannotRunError as error:
        print(f"e2e: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("e2e: interrupted", file=sys.stderr)
    return 2


def _main(options: argparse.Namespace, engine: Engine) -> int:
    phases = Phases()
    cache = Cache(options.cache)
    with phases.phase("install", f"{engine.name} in {cache.root}"):
        engine.install(cache)
    if options.install_only:
        return 0
    folder = _new_folder(options.keep)
    settings = Settings(options.rollouts, options.agents, options.workers, options.seed, folder)
    try:
        findings = asyncio.run(Run(engine, cache, settings, phases).run())
    except BaseException:
        print(f"e2e: its files are in {folder}", file=sys.stderr)
        raise
    if options.keep or findings.mismatches:
        phases.say(f"database, rows and logs are in {folder}")
    else:
        shutil.rmtree(folder)
    _report(engine, options, phases, findings)
    return 1 if findings.mismatches else 0


def _new_folder(keep: Path | None) -> Path:
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="token-id-capture-e2e-"))
    try:
        keep.mkdir(parents=True)
    except OSError as error:
        raise CannotRunError(f"--keep {keep}: {error.strerror}: name a folder that is not there yet") from error
    return keep.absolute()


def _report(engine: Engine, options: argparse.Namespace, phases: Phases, findings: Findings) -> None:
    result = findings.as_dict()
    if options.json:
        about = {"engine": engine.name, "tolerance": engine.tolerance, "workers": options.workers, "seed": options.seed}
        print(json.dumps({**about, **result, "seconds": phases.seconds}, indent=2))
    else:
        for name, value in result.items():
            if name not in ("masked_by_reason", "mismatches"):
                print(f"{name.replace('_', ' '):<35}{value}")
        for reason, count in result["masked_by_reason"].items():
            print(f"{'masked: ' + reason:<35}{count}")
    for what, particulars in findings.mismatches[:_MISMATCHES_SHOWN]:
        print(f"MISMATCH {what}: {particulars[:_TEXT_SHOWN]}", file=sys.stderr)
    total = len(findings.mismatches)
    print(f"e2e: {total} mismatches" if total else "e2e: all of it agrees", file=sys.stderr)
