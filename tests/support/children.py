"""Real processes for tests: started in milliseconds, killed at will, never waited for without a limit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
LIMIT_SECONDS = 60.0


def until(condition: Callable[[], Any], what: str, limit: float = LIMIT_SECONDS) -> Any:
    """Wait until ``condition`` gives something true, and return that; fail after ``limit`` seconds."""
    end = time.monotonic() + limit
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {limit:.0f} s in vain: {what}"
        time.sleep(0.002)
    return value


Start = Callable[..., "Child"]


class Child:
    """One process."""

    def __init__(self, server: Children, pid: int, output: Path) -> None:
        self.pid = pid
        self.output = output
        self.exit_code: int | None = None
        self._server = server

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if the process was not waited for already."""
        if self.exit_code is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.signal(signal.SIGKILL)
        self.wait()

    def poll(self) -> int | None:
        """The exit code (negative: the signal that ended it), or None while it runs."""
        if self.exit_code is None:
            self.exit_code = self._server.ask({"poll": self.pid})
        return self.exit_code

    def wait(self, limit: float = LIMIT_SECONDS) -> int:
        """Wait for the end; the exit code."""
        until(lambda: self.poll() is not None, f"process {self.pid} to end\n{self.text()}", limit)
        assert self.exit_code is not None
        return self.exit_code

    def succeed(self, limit: float = LIMIT_SECONDS) -> None:
        """Wait for the end, and require that it is a good one."""
        assert self.wait(limit) == 0, self.text()

    def text(self) -> str:
        """What it printed so far."""
        return self.output.read_text() if self.output.exists() else ""


class Puppet:
    """A process with an open store that does what it is told, and says what came of it."""

    def __init__(self, start: Start, database: Path, name: str = "puppet", **options: Any) -> None:
        orders, self._answers = database.with_name(f"{name}.orders"), database.with_name(f"{name}.answers")
        os.mkfifo(orders)
        self.child = start("obey", database, orders, self._answers, **options)
        self._orders = os.open(orders, os.O_WRONLY | os.O_CLOEXEC)
        self._asked = 0

    def send(self, method: str, *arguments: Any) -> None:
        """Give an order, and do not wait."""
        os.write(self._orders, json.dumps([method, *arguments]).encode() + b"\n")
        self._asked += 1

    def answer(self, limit: float = LIMIT_SECONDS) -> Any:
        """The answer to the latest order."""
        until(lambda: len(self._lines()) >= self._asked, f"answer {self._asked}\n{self.child.text()}", limit)
        return json.loads(self._lines()[self._asked - 1])

    def do(self, method: str, *arguments: Any, limit: float = LIMIT_SECONDS) -> Any:
        """Give an order, and wait for its answer."""
        self.send(method, *arguments)
        return self.answer(limit)

    def leave(self) -> None:
        """Let it close its store and end."""
        os.close(self._orders)
        self.child.succeed()

    def kill(self) -> None:
        """SIGKILL."""
        os.close(self._orders)
        self.child.kill()

    def open_files(self, name: str) -> int:
        """How many of its descriptors are open on files whose path ends so."""
        directory = Path(f"/proc/{self.child.pid}/fd")
        targets = []
        for link in directory.iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since the directory was read
                targets.append(os.readlink(link))
        return sum(target.endswith(name) for target in targets)

    def _lines(self) -> list[str]:
        return self._answers.read_text().split("\n")[:-1] if self._answers.exists() else []


class Children:
    """The server that forks them, and all that it forked."""

    def __init__(self, library: Path | None) -> None:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": str(TESTS), **({"LD_PRELOAD": str(library)} if library else {})}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "support.child_server"], stdin=theirs.fileno(), env=environment
        )
        theirs.close()
        self._connection = ours
        self._lines = ours.makefile("rw")
        self._started: list[Child] = []

    def ask(self, request: dict[str, Any]) -> Any:
        """One request to the server, and its answer."""
        print(json.dumps(request), file=self._lines, flush=True)
        return json.loads(self._lines.readline())

    def start(
        self, program: str, *arguments: Any, output: Path, control: Path | None = None, trace: Path | None = None
    ) -> Child:
        """Run a function of ``programs`` in a new process, behind ``interpose.c`` if ``control`` is given."""
        request = {
            "start": program,
            "arguments": [str(argument) if isinstance(argument, Path) else argument for argument in arguments],
            "output": str(output),
            "control": str(control or ""),
            "trace": str(trace or ""),
        }
        child = Child(self, self.ask(request), output)
        self._started.append(child)
        return child

    def end_all(self) -> None:
        """Kill whatever still runs."""
        for child in self._started:
            child.signal(signal.SIGKILL)
        for child in self._started:
            child.wait()
        self._started.clear()

    def close(self) -> None:
        """End the server too."""
        self.end_all()
        self._lines.close()
        self._connection.close()
        self._server.wait()
