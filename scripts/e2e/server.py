"""A server process of this run: started, waited for, and stopped with all its children."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from e2e.cache import CannotRunError, end_of, gently

_STOP_SECONDS = 30.0


class Server:
    """A running process that writes to ``log``; ``port`` is where it listens, if it was told."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path, port: int) -> None:
        self.name = name
        self.log = log
        self.port = port
        self._process = process

    async def until(self, ready: Callable[[], object], seconds: float) -> None:
        """Wait until ``ready()`` is true; it may be a coroutine function.

        Raises:
            CannotRunError: the process ended, or the time is over.
        """
        end = time.monotonic() + seconds
        while True:
            answer = ready()
            if await answer if asyncio.iscoroutine(answer) else answer:
                return
            code = self._process.poll()
            if code is not None or time.monotonic() > end:
                problem = f"did not start in {seconds:.0f} s" if code is None else f"ended with code {code}"
                raise CannotRunError(f"{self.name} {problem}; the end of {self.log}:\n{end_of(self.log)}")
            await asyncio.sleep(0.1)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and its children."""
        os.killpg(self._process.pid, number)

    def stop(self) -> None:
        """End the process and its children."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                self.signal(number)
                self._process.wait(_STOP_SECONDS)
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue
        self._process.wait()


@asynccontextmanager
async def running(
    name: str, command: Sequence[str | Path], log: Path, environment: Mapping[str, str], port: int = 0
) -> AsyncIterator[Server]:
    """The process for as long as the block runs."""
    server = Server(name, _started(command, log, environment), log, port)
    try:
        yield server
    finally:
        await asyncio.to_thread(server.stop)


def _started(command: Sequence[str | Path], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            gently(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **environment},
            start_new_session=True,
        )


async def is_healthy(url: str) -> bool:
    """Whether a GET of ``url`` is answered with 200."""
    try:
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return response.status == 200
    except (aiohttp.ClientError, OSError):
        return False


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
