"""The demo's child processes: started, listened to, and always ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeVar

START_SECONDS: Final = 60.0
"""A loaded machine may take this long to start a Python process; normally it is a second."""
_STOP_SECONDS: Final = 10.0

_LISTENING = re.compile(r"listening on (http://\S+)")


_Result = TypeVar("_Result")


class DemoFailedError(Exception):
    """The demo cannot continue; the message says what broke and where to look."""


class EngineProcess:
    """The running engine: its URL, and the moment when it holds a call."""

    def __init__(self, url: str, stdout: asyncio.StreamReader) -> None:
        self.url = url
        self._stdout = stdout

    async def held(self) -> None:
        """Wait until the engine holds a call."""
        line = await self._stdout.readline()
        if not line:
            raise DemoFailedError("the engine ended before it held a call")


@asynccontextmanager
async def running_engine(directory: Path, *, seed: int, model: str, hold: str) -> AsyncIterator[EngineProcess]:
    """The policy engine in a process of its own; its standard error is ``engine.log``."""
    module = "token_id_capture.cli.demo.engine"
    command = ["-m", module, "--seed", str(seed), "--model", model, "--hold", hold]
    log = directory / "engine.log"
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
    async with _ended(process):
        assert process.stdout is not None
        line = await _started(process.stdout.readline(), "the engine", log)
        if not line:
            raise DemoFailedError(f"the engine did not start; {log} says why")
        yield EngineProcess(json.loads(line)["url"], process.stdout)


@asynccontextmanager
async def running_gateway(directory: Path, *, upstream: str, database: Path, workers: int) -> AsyncIterator[str]:
    """``tokcap serve`` on a free port; gives its URL. Its standard error is ``gateway.log``."""
    log = directory / "gateway.log"
    process = await _start_tokcap(
        *("serve", "--upstream", upstream, "--database", str(database)),
        *("--engine", "vllm", "--no-check", "--workers", str(workers), "--port", "0"),
    )
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    assert process.stderr is not None
    copying = asyncio.create_task(_copy(process.stderr, log, address))
    try:
        async with _ended(process):
            yield await _started(asyncio.shield(address), "tokcap serve", log)
    finally:
        await copying


async def _copy(stream: asyncio.StreamReader, log: Path, address: asyncio.Future[str]) -> None:
    """Copy the gateway's log to a file and find the address in it."""
    with log.open("wb") as file:
        async for line in stream:
            file.write(line)
            file.flush()
            found = _LISTENING.search(line.decode("utf-8", "replace"))
            if found and not address.done():
                address.set_result(found[1])
    if not address.done():
        address.set_exception(DemoFailedError(f"tokcap serve did not start; {log} says why"))


async def run_tokcap(*arguments: str) -> tuple[int, str]:
    """Run a command of ``tokcap`` to its end: its exit code and what it printed on standard error."""
    process = await _start_tokcap(*arguments)
    async with _ended(process):
        _, stderr = await process.communicate()
        assert process.returncode is not None
        return process.returncode, stderr.decode("utf-8", "replace")


async def _start_tokcap(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *tokcap(*arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        env=_environment(),
    )


def tokcap(*arguments: str) -> list[str]:
    """The command line of ``tokcap`` in this very installation."""
    return [sys.executable, "-m", "token_id_capture", *arguments]


def _environment() -> dict[str, str]:
    """This process's environment without settings that somebody made for a gateway of their own."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TOKCAP_")}


async def _started(waiting: Awaitable[_Result], what: str, log: Path) -> _Result:
    try:
        return await asyncio.wait_for(waiting, START_SECONDS)
    except TimeoutError:
        raise DemoFailedError(f"{what} did not start within {START_SECONDS:.0f} seconds; see {log}") from None


@asynccontextmanager
async def _ended(process: asyncio.subprocess.Process) -> AsyncIterator[None]:
    """Leave nothing of the process behind, whatever ends the block."""
    try:
        yield
    finally:
        if process.stdin is not None:
            process.stdin.close()
        elif process.returncode is None:
            process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _STOP_SECONDS)
        # The process leads a group of its own, which also holds what it may have left behind.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
