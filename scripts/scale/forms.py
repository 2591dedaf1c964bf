"""What ``tokcap finalize`` and ``tokcap export`` cost in each form of their output.

One database of rollouts of three calls is finalized as trajectories to JSON lines and to Parquet, in turn, and
exported by one process and by as many as there are processors. Prints the processor and wall time of each, the
ratio of Parquet to JSON lines, and the peak memory of each and of a tenth of the rollouts, as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scale.finalizing import TURNS, filled

FORMS = ("jsonl", "parquet")


@dataclass(frozen=True)
class Used:
    """What a command used, its children included."""

    processor_seconds: float
    wall_seconds: float
    peak_megabytes: float


def used_by(command: list[str]) -> Used:
    """Run ``tokcap`` with these arguments, which has to succeed."""
    started = time.perf_counter()
    pid = os.posix_spawn(sys.executable, [sys.executable, "-m", "token_id_capture", *command], dict(os.environ))
    _, status, used = os.wait4(pid, 0)
    if status:
        raise SystemExit(f"tokcap {command[0]} ended with {os.waitstatus_to_exitcode(status)}")
    return Used(used.ru_utime + used.ru_stime, time.perf_counter() - started, used.ru_maxrss / 1024)


def finalize(database: Path, rollouts: int, form: str) -> Used:
    """Finalize so many rollouts of the database."""
    with tempfile.TemporaryDirectory(dir=database.parent) as directory:
        records = Path(directory) / "records.jsonl"
        records.write_text(
            "".join(f'{{"_ng_rollout_id": "{number}-0", "reward": 1.0}}\n' for number in range(rollouts))
        )
        output = Path(directory) / f"rows.{form}"
        options = ["--format", "trajectory", "--database", str(database), "--output", str(output)]
        return used_by(["finalize", str(records), *options])


def export(database: Path, form: str, jobs: int) -> Used:
    """Export the whole database."""
    with tempfile.TemporaryDirectory(dir=database.parent) as directory:
        options = ["--database", str(database), "--output", f"{directory}/rows.{form}", "--jobs", str(jobs)]
        return used_by(["export", *options])


def median(runs: list[Used]) -> dict[str, Any]:
    """The run in the middle, by processor time, and the largest memory."""
    middle = statistics.median_low([run.processor_seconds for run in runs])
    wall = statistics.median([run.wall_seconds for run in runs])
    peak = max(run.peak_megabytes for run in runs)
    return {"CPU s": round(middle, 2), "wall s": round(wall, 2), "peak MB": round(peak, 1)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=10_000, help="rollouts in the database (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, of which the median counts (%(default)s)")
    options = parser.parse_args()
    tenth = max(1, options.rollouts // 10)
    with tempfile.TemporaryDirectory() as directory:
        database = filled(Path(directory) / "captures.db", options.rollouts, 1, TURNS)
        finalize(database, options.rollouts, "jsonl")  # which freezes, so that all runs find the same
        runs: dict[str, list[Used]] = {}
        for _ in range(options.repeats):
            for form in FORMS:
                runs.setdefault(f"finalize {form}", []).append(finalize(database, options.rollouts, form))
                runs.setdefault(f"export {form}, one process", []).append(export(database, form, 1))
            runs.setdefault("export jsonl", []).append(export(database, "jsonl", 0))
        of_tenth = {form: finalize(database, tenth, form).peak_megabytes for form in FORMS}
    found = {name: median(of) for name, of in runs.items()}
    result = {
        "rollouts": options.rollouts,
        **found,
        "Parquet to JSON lines, CPU": round(found["finalize parquet"]["CPU s"] / found["finalize jsonl"]["CPU s"], 3),
        "peak MB of a tenth": {form: round(peak, 1) for form, peak in of_tenth.items()},
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
