"""Engine and gateway, up for as long as a run needs them."""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp

from e2e.agents import MODEL
from e2e.cache import Cache, CannotRunError
from e2e.engine import Engine
from e2e.progress import Phases
from e2e.server import Server, running
from e2e.tap import Tap

TOKCAP = (sys.executable, "-m", "token_id_capture")
DRAIN_SECONDS = 120
_LISTENING = re.compile(r"listening on (http://\S+)")
_START_SECONDS = 120


@asynccontextmanager
async def engine_started(engine: Engine, cache: Cache, logs: Path, phases: Phases) -> AsyncIterator[Server]:
    """The engine, after its first answer, which takes longer than all others."""
    async with AsyncExitStack() as stack:
        with phases.phase("engine start", f"start {engine.name}"):
            server = await stack.enter_async_context(engine.running(cache, logs))
        with phases.phase("first request", "its first request"):
            await _warm_up(f"http://127.0.0.1:{server.port}")
        yield server


@asynccontextmanager
async def gateway_started(engine: Engine, tap: Tap, database: Path, workers: int, log: Path) -> AsyncIterator[str]:
    """``tokcap serve`` in front of the tap; it gives the gateway's address."""
    command: list[str | Path] = [
        *TOKCAP, "serve", "--upstream", f"http://127.0.0.1:{tap.port}/v1", "--engine", engine.option,
        "--database", database, "--port", "0", "--workers", str(workers), *engine.gateway_options,
    ]  # fmt: skip
    environment = {"TOKCAP_DRAIN_SECONDS": str(DRAIN_SECONDS), "TOKCAP_LOG_PROBS_MODE": "raw_logprobs"}
    async with running("tokcap serve", command, log, environment) as server:
        await server.until(lambda: _address(log), _START_SECONDS)
        yield _address(log)


def _address(log: Path) -> str:
    """Where the gateway says that it listens; empty if it has not said so yet."""
    match = _LISTENING.search(log.read_text("utf-8"))
    return match[1] if match else ""


async def _warm_up(url: str) -> None:
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 2}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise CannotRunError(f"the engine's first response: HTTP {response.status}: {await response.text()}")
        await response.read()
