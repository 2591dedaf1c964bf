"""Kills of every role at once: writers, finalize, prune, vacuum, backup, and a server with its workers.

Each role is the real command in a process of its own. Writers and the server's clients note what was
acknowledged; the commands' own files are the rest of what is compared at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
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
# Of the kills, those that hit the database's server, if there is one.
_STRIKES = 0.25
# What a command may end with by itself; 1 is "something was masked, or damaged", which check_roles judges.
_GOOD_ENDS = (0, 1)


@dataclass(slots=True)
class Role:
    """A place that one process after the other holds."""

    name: str
    start: Callable[[int], int | subprocess.Popen[bytes] | None]
    ended: Callable[[int], None] = lambda code: None
    # Whether it does what it is for, and for how long it may then; most are not killed before.
    begun: Callable[[], bool] = lambda: True
    lives: float = 1.0
    generation: int = 0
    held: Any = None
    since: float = 0.0
    has_begun: bool = False
    # Of those in a row that were killed before they had done what they are for: on a busy machine the next live longer.
    killed: int = 0

    @property
    def kind(self) -> str:
        """What all of its kind are called."""
        return self.name.rstrip("01")

    @property
    def is_gateway(self) -> bool:
        """Whether it has workers."""
        return self.kind == "serve"

    @property
    def pid(self) -> int:
        """The process that holds it now."""
        return self.held if isinstance(self.held, int) else int(self.held.pid)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a gateway runs: the words in front of its command, its address, and what it calls engine and database."""

    prefix: tuple[str, ...]
    host: str
    engine_host: str
    database: str
    port: int = field(default_factory=free_port)

    def is_served(self) -> bool:
        """Whether a worker answers there; its parent listens long before."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=0.2)
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
            connection.request("GET", "/healthz")
            return connection.getresponse().status == HTTPStatus.OK
        return False


FILE_COMMANDS = (("prune", "--older-than", "2s", "--evidence", "--yes"), ("vacuum",))


@dataclass(slots=True)
class Roles:
    """One run: start all, kill one after the other, end all, and compare.

    ``database`` is what the commands work on, ``compare`` looks at it at the end. ``strike`` hits the server of the
    database, if it is on one.
    """

    plan: Plan
    directory: Path
    database: str
    gateways: Sequence[Place]
    commands: tuple[tuple[str, ...], ...]
    compare: Callable[[Findings], None]
    strike: Callable[[], str] | None = None
    findings: Findings = field(default_factory=Findings)
    batch: int = 0
    engine_port: int = field(default_factory=free_port)

    @classmethod
    def on_a_file(cls, plan: Plan, directory: Path) -> Roles:
        """On a file that this mode makes; the one of the writers' rounds is another."""
        database = directory / "captures.db"
        return cls(
            plan,
            directory,
            str(database),
            [Place((), "127.0.0.1", "127.0.0.1", str(database))],
            (*FILE_COMMANDS, ("backup",)),
            lambda findings: check_roles(directory, database, findings),
        )

    def run(self, seconds: float, stopped: Callable[[], bool]) -> Findings:
        """Torture for some seconds."""
        self.directory.mkdir()
        dice = random.Random(f"{self.plan.seed}/roles")
        _make(self.database)
        addresses = [(place.host, place.port) for place in self.gateways]
        traffic = fork(lambda: run_traffic(self.directory, addresses, (self.gateways[0].engine_host, self.engine_port)))
        roles = [Role(f"writer{place}", self._writer) for place in range(2)]
        roles.append(Role("finalize", self._finalize, self._next_batch))
        roles += [Role(name, self._command(name, *words)) for name, *words in self.commands]
        roles += [
            Role(f"serve{at}", self._serve(place), begun=place.is_served, lives=2.0)
            for at, place in enumerate(self.gateways)
        ]
        end, next_kill = time.monotonic() + seconds, time.monotonic() + _KILL_SECONDS
        try:
            while time.monotonic() < end and not stopped():
                for role in roles:
                    self._keep_up(role)
                if time.monotonic() >= next_kill:
                    self._kill_somebody(roles, dice)
                    next_kill = time.monotonic() + dice.expovariate(1 / _KILL_SECONDS)
                time.sleep(_STEP_SECONDS)
        finally:
            for role in roles:
                self._end(role)
            os.kill(traffic, signal.SIGKILL)
            os.waitpid(traffic, 0)
        self.compare(self.findings)
        return self.findings

    def _keep_up(self, role: Role) -> None:
        code = None if role.held is None else _code_of(role.held)
        if role.held is not None and code is None:
            return
        if code is not None:
            self.findings.counts[f"{role.kind} ends"] += 1
            # The port is still held by workers of a supervisor that was killed.
            if code not in _GOOD_ENDS and not (role.is_gateway and code == 2):
                self.findings.add("error", f"{role.name} ended by itself ({code}): see its log in {self.directory}")
            role.ended(code)
            role.killed = 0
        role.generation += 1
        role.held, role.since, role.has_begun = role.start(role.generation), time.monotonic(), False

    def _kill_somebody(self, roles: list[Role], dice: random.Random) -> None:
        if self.strike is not None and dice.random() < _STRIKES and (struck := self.strike()):
            self.findings.counts[struck] += 1
        elif victims := [role for role in roles if _may_be_killed(role, dice)]:
            self._kill(dice.choice(victims), dice)

    def _kill(self, role: Role, dice: random.Random) -> None:
        pid = role.pid
        workers = _children(pid) if role.is_gateway else []
        if workers and dice.random() < 0.85:
            self.findings.counts["worker kills"] += 1
            with contextlib.suppress(ProcessLookupError):
                os.kill(dice.choice(workers), signal.SIGKILL)
            return
        self.findings.counts[f"{role.kind} kills"] += 1
        role.killed = 0 if role.is_gateway and role.has_begun else role.killed + 1
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

    def _command(self, name: str, *words: str) -> Callable[[int], subprocess.Popen[bytes]]:
        def start(generation: int) -> subprocess.Popen[bytes]:
            copy = [str(self.directory / f"backup-{generation % 3}-{generation}.db")] if name == "backup" else []
            return self._tokcap(name, *copy, *words)

        return start

    def _serve(self, place: Place) -> Callable[[int], subprocess.Popen[bytes]]:
        words = ["--upstream", f"http://{place.engine_host}:{self.engine_port}", "--engine", "vllm", "--no-check"]
        words += ["--host", place.host, "--port", str(place.port), "--workers", "2", "--shutdown-seconds", "0"]
        if place.prefix:
            words.append("--insecure")  # the address is one of nobody else's
        return lambda generation: self._tokcap("serve", *words, place=place)

    def _tokcap(self, command: str, *words: str, place: Place | None = None) -> subprocess.Popen[bytes]:
        prefix, database = (place.prefix, place.database) if place else ((), self.database)
        arguments = [*prefix, sys.executable, "-m", "token_id_capture", command, *words, "--database", database]
        with (self.directory / f"{command}.log").open("ab") as log:
            return subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _may_be_killed(role: Role, dice: random.Random) -> bool:
    early = dice.random() < _EARLY_KILLS and not role.killed
    if role.held is not None and not role.has_begun and role.begun():
        role.has_begun, role.since = True, time.monotonic()
    return role.held is not None and (
        early or (role.has_begun and time.monotonic() - role.since > role.lives * 2**role.killed)
    )


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


def _make(database: str) -> None:
    async def main() -> None:
        async with TokenCaptureStore(database):
            pass

    # In a process that ends: one that has a database open must not fork.
    os.waitpid(fork(lambda: asyncio.run(main())), 0)


async def _write_rollouts(database: str, finished: Path, name: str) -> None:
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
