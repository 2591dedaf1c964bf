"""Kills of every role at once: writers, finalize, prune, vacuum, backup, and a server with its workers.

Each role is the real command in a process of its own. Writers and the server's clients note what was
acknowledged; the commands' own files are the rest of what is compared at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from token_id_capture.store import TokenCaptureStore
from torturing.check import Findings
from torturing.plan import Plan
from torturing.records import call_id, entry_of
from torturing.roles_check import check_roles
from torturing.supervise import fork
from torturing.traffic import free_port, run_traffic

CALLS = 3
_STEP_SECONDS = 0.05
_KILL_SECONDS = 0.6
_EARLY_KILLS = 0.1
# What a command may end with by itself; 1 is "something was masked, or damaged", which check_roles judges.
_GOOD_ENDS = (0, 1)


@dataclass(slots=True)
class Role:
    """A place that one process after the other holds."""

    name: str
    start: Callable[[int], int | subprocess.Popen[bytes] | None]
    ended: Callable[[int], None] = lambda code: None
    # How long a process usually takes until it does what it is for; most are not killed before.
    starts_in: float = 1.0
    generation: int = 0
    held: Any = None
    since: float = 0.0

    @property
    def pid(self) -> int:
        """The process that holds it now."""
        return self.held if isinstance(self.held, int) else int(self.held.pid)


@dataclass(slots=True)
class Roles:
    """One run: start all, kill one after the other, end all, and compare."""

    plan: Plan
    directory: Path
    findings: Findings = field(default_factory=Findings)
    batch: int = 0
    port: int = field(default_factory=free_port)
    engine_port: int = field(default_factory=free_port)

    @property
    def database(self) -> Path:
        """The database of this mode; the one of the writers' rounds is another."""
        return self.directory / "captures.db"

    def run(self, seconds: float, stopped: Callable[[], bool]) -> Findings:
        """Torture for some seconds."""
        self.directory.mkdir()
        dice = random.Random(f"{self.plan.seed}/roles")
        _make(self.database)
        traffic = fork(lambda: run_traffic(self.directory, self.port, self.engine_port))
        roles = [Role(f"writer{place}", self._writer) for place in range(2)]
        roles.append(Role("finalize", self._finalize, self._next_batch))
        roles += [Role(name, self._command(*words)) for name, *words in self._commands()]
        roles.append(Role("backup", self._backup))
        roles.append(Role("serve", self._serve, starts_in=7.0))
        end, next_kill = time.monotonic() + seconds, time.monotonic() + _KILL_SECONDS
        try:
            while time.monotonic() < end and not stopped():
                for role in roles:
                    self._keep_up(role)
                if time.monotonic() >= next_kill:
                    if victims := [role for role in roles if _may_be_killed(role, dice)]:
                        self._kill(dice.choice(victims), dice)
                    next_kill = time.monotonic() + dice.expovariate(1 / _KILL_SECONDS)
                time.sleep(_STEP_SECONDS)
        finally:
            for role in roles:
                self._end(role)
            os.kill(traffic, signal.SIGKILL)
            os.waitpid(traffic, 0)
        check_roles(self.directory, self.database, self.findings)
        return self.findings

    def _commands(self) -> list[tuple[str, ...]]:
        return [
            ("prune", "prune", "--older-than", "2s", "--evidence", "--yes"),
            ("vacuum", "vacuum"),
        ]

    def _keep_up(self, role: Role) -> None:
        code = None if role.held is None else _code_of(role.held)
        if role.held is not None and code is None:
            return
        if code is not None:
            self.findings.counts[f"{role.name.rstrip('01')} ends"] += 1
            # The port is still held by workers of a supervisor that was killed.
            if code not in _GOOD_ENDS and not (role.name == "serve" and code == 2):
                self.findings.add("error", f"{role.name} ended by itself ({code}): see its log in {self.directory}")
            role.ended(code)
        role.generation += 1
        role.held, role.since = role.start(role.generation), time.monotonic()

    def _kill(self, role: Role, dice: random.Random) -> None:
        pid = role.pid
        workers = _children(pid) if role.name == "serve" else []
        if workers and dice.random() < 0.85:
            self.findings.counts["worker kills"] += 1
            with contextlib.suppress(ProcessLookupError):
                os.kill(dice.choice(workers), signal.SIGKILL)
            return
        self.findings.counts[f"{role.name.rstrip('01')} kills"] += 1
        self._end(role)

    def _end(self, role: Role) -> None:
        if role.held is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(role.pid, signal.SIGKILL)
        if isinstance(role.held, int):
            os.waitpid(role.held, 0)
        else:
            role.held.wait()
        role.held = None

    # The processes

    def _writer(self, generation: int) -> int:
        name = f"{generation}.{time.monotonic_ns()}"
        return fork(lambda: asyncio.run(_write_rollouts(self.database, self.directory / "finished", name)))

    def _finalize(self, generation: int) -> subprocess.Popen[bytes] | None:
        batch = self.directory / f"batch-{self.batch}.jsonl"
        if not batch.exists():
            done = sum(len(path.read_text().splitlines()) for path in self.directory.glob("batch-*.jsonl"))
            finished = _lines(self.directory / "finished")[done:]
            if not finished:
                return None
            batch.write_text("".join(f'{{"_ng_rollout_id": "{name}", "reward": 1.0}}\n' for name in finished))
        rows = self.directory / f"rows-{self.batch}.jsonl"
        return self._tokcap("finalize", str(batch), "--output", str(rows), "--format", "trajectory", "--retire")

    def _next_batch(self, code: int) -> None:
        self.batch += 1

    def _command(self, *words: str) -> Callable[[int], subprocess.Popen[bytes]]:
        return lambda generation: self._tokcap(*words)

    def _backup(self, generation: int) -> subprocess.Popen[bytes]:
        return self._tokcap("backup", str(self.directory / f"backup-{generation % 3}-{generation}.db"))

    def _serve(self, generation: int) -> subprocess.Popen[bytes]:
        engine = f"http://127.0.0.1:{self.engine_port}"
        options = ("--port", str(self.port), "--workers", "2", "--engine", "vllm", "--no-check")
        return self._tokcap("serve", "--upstream", engine, *options, "--shutdown-seconds", "0")

    def _tokcap(self, command: str, *words: str) -> subprocess.Popen[bytes]:
        arguments = [sys.executable, "-m", "token_id_capture", command, *words, "--database", str(self.database)]
        with (self.directory / f"{command}.log").open("ab") as log:
            return subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _may_be_killed(role: Role, dice: random.Random) -> bool:
    early = dice.random() < _EARLY_KILLS
    return role.held is not None and (early or time.monotonic() - role.since > role.starts_in)


def _lines(path: Path) -> list[str]:
    return path.read_text().split("\n")[:-1] if path.exists() else []


def _code_of(held: Any) -> int | None:
    if isinstance(held, int):
        pid, status = os.waitpid(held, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None
    return held.poll()  # type: ignore[no-any-return]


def _children(pid: int) -> list[int]:
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    # The first is multiprocessing's resource tracker.
    return [int(child) for child in found[1:]]


def _make(database: Path) -> None:
    async def main() -> None:
        async with TokenCaptureStore(database):
            pass

    # In a process that ends: one that has a database open must not fork.
    os.waitpid(fork(lambda: asyncio.run(main())), 0)


async def _write_rollouts(database: Path, finished: Path, name: str) -> None:
    """Store one rollout after the other, and note each when its last call was acknowledged."""
    descriptor = os.open(finished, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    parent = os.getppid()
    store = TokenCaptureStore(database)
    number = 0
    while os.getppid() == parent:
        rollout_id = f"w{name}.{number}"
        prompt = 5
        for call in range(CALLS):
            model_call_id = call_id(prompt, 20, f"c{call}")
            await store.begin_call(rollout_id, model_call_id)
            entry = entry_of(rollout_id, model_call_id)
            await store.put(entry.model_copy(update={"finish_reason": "stop", "routed_experts": None}))
            prompt += 25
        os.write(descriptor, f"{rollout_id}\n".encode())
        number += 1
        await asyncio.sleep(0.01)
