"""Copy many rollouts to another database and back, and compare what is exported from both files byte for byte.

Also compares every row of the two files, and can kill the copies on their way. Prints JSON; exit code 1: something
differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Final

from scale.many_rollouts import make_database
from scale.templates import Shape

EXPORTS: Final = ((), ("--per-request",), ("--include-open",), ("--sequences", "all"))


def tokcap(*arguments: object) -> subprocess.Popen[bytes]:
    """Start a command."""
    return subprocess.Popen([sys.executable, "-m", "token_id_capture", *map(str, arguments)])


def copy(source: str, target: str, kills: int) -> float:
    """Copy everything, after killing that many copies at random moments; the seconds of the one that ended."""
    longest = 2.0
    for _ in range(kills):
        killed = tokcap("copy", source, target, "--include-open")
        try:
            killed.wait(random.uniform(0.3, longest))
        except subprocess.TimeoutExpired:
            killed.kill()
            killed.wait()
    begun = time.perf_counter()
    if code := tokcap("copy", source, target, "--include-open").wait():
        raise SystemExit(f"tokcap copy {source} {target} ended with {code}")
    return time.perf_counter() - begun


def exported(database: Path, options: tuple[str, ...]) -> tuple[str, int]:
    """The sha256 and the length of an export in bytes."""
    output = database.with_suffix(".jsonl")
    code = tokcap("export", "--database", database, "--output", output, "--overwrite", *options).wait()
    if code:
        raise SystemExit(f"tokcap export of {database} ended with {code}")
    content = output.read_bytes()
    return hashlib.sha256(content).hexdigest(), len(content)


def rows_of(database: Path) -> dict[str, str]:
    """The sha256 of all rows of each table, in the order of their storing within a rollout."""
    from support.whole_content import whole_content

    return {table: hashlib.sha256(repr(rows).encode()).hexdigest() for table, rows in whole_content(database).items()}


def main() -> None:
    """Run ``scripts/copy-there-and-back``."""
    parser = argparse.ArgumentParser(prog="scripts/copy-there-and-back", description=__doc__)
    parser.add_argument("--rollouts", type=int, default=10_000, metavar="N")
    parser.add_argument(
        "--through", metavar="DATABASE", help="the empty database in between: a path or a URL; by default a new file"
    )
    parser.add_argument("--kills", type=int, default=0, metavar="N", help="copies to kill in each direction")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # about this machine's SQLite
    with tempfile.TemporaryDirectory() as directory:
        original, back = Path(directory, "original.db"), Path(directory, "back.db")
        through = options.through or str(Path(directory, "through.db"))
        make_database(original, options.rollouts, Shape())
        seconds = copy(str(original), through, options.kills), copy(through, str(back), options.kills)
        exports = {" ".join(more) or "default": (exported(original, more), exported(back, more)) for more in EXPORTS}
        rows = rows_of(original), rows_of(back)
        tables_that_differ = sorted(table for table in rows[0] if rows[0][table] != rows[1][table])
    different = [name for name, (before, after) in exports.items() if before != after]
    result = {
        "rollouts": options.rollouts + 1,
        "killed copies": 2 * options.kills,
        "seconds there": round(seconds[0], 1),
        "seconds back": round(seconds[1], 1),
        "bytes of each export": {name: before[1] for name, (before, _) in exports.items()},
        "exports that differ": different,
        "tables that differ": tables_that_differ,
    }
    print(json.dumps(result, indent=1))
    sys.exit(bool(different or tables_that_differ))


if __name__ == "__main__":
    main()
