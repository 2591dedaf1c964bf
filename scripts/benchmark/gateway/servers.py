"""What stands between the clients and the engine, as commands, and what their processes spend."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmark.gateway.bare import UPSTREAM
from benchmark.gateway.conversations import MODEL

CHAT = "/v1/chat/completions"
_SCRIPTS = Path(__file__).parents[2]
_TICKS = os.sysconf("SC_CLK_TCK")
_START_SECONDS = 60.0
_STOP_SECONDS = 30.0


@dataclass(frozen=True)
class Kind:
    """A kind of server: its command, and the path at which it takes chats of a rollout."""

    path: str
    command: Callable[[str, int, int, Path], Sequence[str | Path]]
    """From the engine's URL, the port, the number of workers and a directory of its own."""
    program: str
    """It can be started where there is this program, which may be a path."""
    environment: Callable[[str], Mapping[str, str]] = field(default=lambda upstream: {})
    several_workers: bool = False


def _ours(upstream: str, port: int, workers: int, directory: Path) -> Sequence[str | Path]:
    serve = (Path(sys.executable).with_name("tokcap"), "serve", "-u", upstream, "-d", directory / "captures.db")
    return (*serve, "--port", str(port), "--workers", str(workers), "--engine", "vllm", "--no-check")


def _unobserved(upstream: str, port: int, workers: int, directory: Path) -> Sequence[str | Path]:
    return (sys.executable, "-m", "benchmark.gateway.unobserved", *_ours(upstream, port, workers, directory)[1:])


def _bare(upstream: str, port: int, workers: int, directory: Path) -> Sequence[str | Path]:
    served = (sys.executable, "-m", "uvicorn", "benchmark.gateway.bare:app", "--factory", "--port", str(port))
    return (*served, "--workers", str(workers), "--no-access-log", "--log-level", "warning")


def _rllm(upstream: str, port: int, workers: int, directory: Path) -> Sequence[str | Path]:
    served = ("rllm-model-gateway", "--port", str(port), "--worker", f"{upstream}/v1")
    return (*served, "--store", "sqlite", "--db-path", directory / "traces.db", "--log-level", "WARNING")


def _litellm(upstream: str, port: int, workers: int, directory: Path) -> Sequence[str | Path]:
    models = "".join(
        f"  - model_name: {name}\n    litellm_params:\n"
        f"      {{model: hosted_vllm/{name}, api_base: {upstream}/v1, api_key: none}}\n"
        for name in (MODEL.format(0), MODEL.format(30))
    )
    configuration = directory / "litellm.yaml"
    configuration.write_text(f"model_list:\n{models}")
    return ("litellm", "--config", configuration, "--port", str(port), "--num_workers", str(workers))


KINDS: Mapping[str, Kind] = {
    "bare": Kind(
        CHAT,
        _bare,
        sys.executable,
        lambda upstream: {UPSTREAM: upstream, "PYTHONPATH": str(_SCRIPTS)},
        several_workers=True,
    ),
    "ours": Kind("/ng-rollout/{rollout}/training-token-capture" + CHAT, _ours, sys.executable, several_workers=True),
    "rllm": Kind("/sessions/{rollout}" + CHAT, _rllm, "rllm-model-gateway"),
    "litellm": Kind(CHAT, _litellm, "litellm", several_workers=True),
}

UNOBSERVED = "unobserved"
_ALL = {
    **KINDS,
    UNOBSERVED: Kind(KINDS["ours"].path, _unobserved, sys.executable, lambda upstream: {"PYTHONPATH": str(_SCRIPTS)}),
}


def installed() -> list[str]:
    """The kinds whose program is here."""
    return [name for name, kind in KINDS.items() if shutil.which(kind.program)]


class Server:
    """A running server."""

    def __init__(self, name: str, url: str, process: subprocess.Popen[bytes], directory: Path) -> None:
        self.name = name
        self.url = url
        self.path = _ALL[name].path
        self.directory = directory
        self._process = process

    def cpu(self) -> float:
        """The processor seconds of its processes so far."""
        return cpu_of(self._process.pid)

    def running_seconds(self) -> float:
        """The same of the threads that it has now, to the nanosecond."""
        files = [file for pid in family(self._process.pid) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        return sum(int(file.read_text().split()[0]) for file in files) / 1e9

    def stop(self) -> None:
        """End it as an operator would, or by force."""
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def running(
    name: str,
    upstream: str,
    directory: Path,
    *,
    workers: int = 1,
    further: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Start a server, with further arguments and variables, and wait until it accepts connections.

    Raises:
        RuntimeError: it ended, or did not in time; what it said is in ``said`` in the directory.
    """
    kind = _ALL[name]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    directory.mkdir()
    command = (*kind.command(upstream, port, workers, directory), *further)
    with (directory / "said").open("wb") as said:
        environment = {**os.environ, **kind.environment(upstream), **(variables or {})}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment)
    server = Server(name, f"http://127.0.0.1:{port}", process, directory)
    try:
        _wait_until_it_listens(port, process, directory / "said")
        yield server
    finally:
        server.stop()


def _wait_until_it_listens(port: int, process: subprocess.Popen[bytes], said: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        time.sleep(0.1)
    raise RuntimeError(f"{process.args!r} does not listen: {said.read_text('utf-8', 'replace')[-2000:]}")


def family(pid: int) -> list[int]:
    """A process and those that it started, as far as they run."""
    parents = {}
    for directory in Path("/proc").iterdir():
        if directory.name.isdecimal():
            with contextlib.suppress(OSError):
                parents[int(directory.name)] = int(_stat(int(directory.name))[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def cpu_of(pid: int) -> float:
    """The processor seconds so far of a process and of those that it started, as far as they run."""
    spent = 0.0
    for one in family(pid):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            spent += _cpu(one)
    return spent


def _stat(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` from the state on, after the name in parentheses."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _cpu(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS
