"""Run the tests of an unpacked NeMo Gym that are about token capture, with this store in place.

    own_tests.py DIRECTORY

Prints counts as JSON, and why tests that failed cannot hold; exit code 1 if one failed that must hold.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from not_applicable import why_not

HERE = Path(__file__).parent
ABOUT = re.compile(r"token_id_capture|token_capture|TokenCapture")
LINE = re.compile(r"^(PASSED|FAILED|ERROR) tests/unit_tests/(\S+)", re.MULTILINE)


def main(directory: Path) -> int:
    """The exit code."""
    tests = sorted((directory / "tests" / "unit_tests").glob("test_*.py"))
    chosen = [str(path.relative_to(directory)) for path in tests if ABOUT.search(path.read_text("utf-8"))]
    options = ("-q", "-p", "in_place", "-p", "no:cacheprovider", "-W", "ignore", "-rA", "--tb=no")
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *chosen],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
    )
    results = LINE.findall(ran.stdout)
    if not results:
        sys.exit(ran.stdout[-2000:] + ran.stderr[-2000:])
    not_held = [(name, why_not(name)) for outcome, name in results if outcome != "PASSED"]
    broken = [name for name, reason in not_held if reason is None]
    counts = Counter(outcome.lower() for outcome, _ in results)
    cannot_hold = Counter(reason for _, reason in not_held if reason is not None)
    json.dump({**counts, "cannot_hold": cannot_hold, "broken": broken}, sys.stdout, indent=1)
    print()
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
