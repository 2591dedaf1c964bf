"""The command ``tokcap serve`` as a real process, for the tests of what it does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from support.commands import RunTokcap
from support.made_up import BODY

TOKCAP = Path(sys.executable).with_name("tokcap")
LIMIT_SECONDS = 60


@dataclass
class Serving:
    """A running ``tokcap serve``; ``before`` is what it said up to its address, ``lines`` what it said since."""

    process: asyncio.subprocess.Process
    url: str
    before: list[str]
    lines: list[str]
    reading: asyncio.Task[None]

    async def post(self, path: str, body: Any = BODY, **headers: str) -> tuple[int, bytes]:
        return await self.request("POST", path, json=body, headers=headers)

    async def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        return await self.request("GET", path, headers=headers)

    async def request(self, method: str, path: str, **options: Any) -> tuple[int, bytes]:
        """On a connection of its own, so that any worker may answer."""
        async with aiohttp.ClientSession() as session, session.request(method, self.url + path, **options) as response:
            return response.status, await response.read()

    def base(self, rollout: str = "r1") -> str:
        return f"/ng-rollout/{rollout}/training-token-capture"

    async def stop(self, number: int) -> tuple[int, str]:
        """Send a signal; the exit code, and what stood on standard error after the first line."""
        self.process.send_signal(number)
        return await self.ended()

    async def ended(self) -> tuple[int, str]:
        async with asyncio.timeout(LIMIT_SECONDS):
            await self.reading
            return await self.process.wait(), "".join(self.lines)


async def started(*arguments: str, **environment: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        TOKCAP,
        "serve",
        *arguments,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
    )


@contextlib.asynccontextmanager
async def serving(database: Path | str, upstream: str, *arguments: str, **environment: str) -> AsyncIterator[Serving]:
    options = () if "--check" in arguments else ("--no-check",)
    process = await started("-u", upstream, "-d", str(database), "--port", "0", *options, *arguments, **environment)
    stderr = process.stderr
    assert stderr is not None
    before: list[str] = []
    lines: list[str] = []

    async def read() -> None:
        # All the time: a process whose pipe is full waits.
        while line := await stderr.readline():
            lines.append(line.decode())

    reading: asyncio.Task[None] | None = None
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            address = None
            while address is None:
                line = (await stderr.readline()).decode()
                assert line, "".join(before)
                before.append(line)
                address = re.search(r"listening on (http://[\w.:\[\]]+)", line)
        reading = asyncio.create_task(read())
        yield Serving(process, address[1].replace("0.0.0.0", "127.0.0.1"), before, lines, reading)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        if reading is not None:
            await reading


async def refused(tokcap: RunTokcap, *arguments: str, **environment: str) -> str:
    """What a start that must fail says."""
    done = await asyncio.to_thread(tokcap, "serve", *arguments, env=environment)
    assert done.returncode == 2, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("tokcap: ")
    return lines[0].removeprefix("tokcap: ")
