"""Starting measured processes, together, and collecting what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_SCRIPTS = Path(__file__).parent.parent


@dataclass(frozen=True)
class Job:
    """A job for a child process; see ``child``."""

    module: str
    arguments: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)


class Child:
    """A started process, which is ready once the constructor returns."""

    def __init__(self, job: Job) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmark.child", job.module, json.dumps(job.arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(_SCRIPTS), **job.environment},
        )
        self._job = job

    def wait_until_ready(self) -> dict[str, Any]:
        """Return when it has prepared everything, with what it says about that."""
        return self._line()

    def go(self) -> None:
        """Let it begin, or continue to the next point at which it waits."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def result(self) -> dict[str, Any]:
        """Wait for its end and return its result.

        Raises:
            RuntimeError: it failed; what it said is on standard error.
        """
        result = self._line()
        self._process.communicate()
        return result

    def kill(self) -> None:
        """End it, if it has not ended."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.kill()
            raise RuntimeError(f"the job {self._job.module} {dict(self._job.arguments)} failed")
        found: dict[str, Any] = json.loads(line)
        return found


def run_together(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Run jobs at the same time, each in a new process, and return their results."""
    # What earlier runs left unwritten must not slow down this one's fsync.
    os.sync()
    children: list[Child] = []
    try:
        children.extend(map(Child, jobs))
        for child in children:
            child.wait_until_ready()
        for child in children:
            child.go()
        return [child.result() for child in children]
    finally:
        for child in children:
            child.kill()
