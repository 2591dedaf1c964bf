"""Runs the demo from a directory to a report, and leaves no process behind."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from token_id_capture.cli.demo.processes import DemoFailedError, run_tokcap, running_engine, running_gateway
from token_id_capture.cli.demo.stories import HELD_TEXT, MODEL, POLICY_SEED
from token_id_capture.cli.demo.summary import Report
from token_id_capture.cli.output.progress import Show, progress_bar
from token_id_capture.testing.policy import Policy

if TYPE_CHECKING:
    from token_id_capture.cli.demo.journey import Rollout

WORKERS: Final = 2
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class InterruptedDemoError(Exception):
    """A signal ended the demo; its processes are gone."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.signal = number


def run_demo(directory: Path | None, keep: bool) -> Report:
    """Run it; the directory is removed again unless ``keep``.

    Raises:
        DemoFailedError: something could not be started or broke on the way.
        InterruptedDemoError: a signal came.
    """
    place = _make_directory(directory)
    try:
        with progress_bar() as show:
            return asyncio.run(_until_signal(_Demo(place, keep, show)))
    finally:
        if not keep:
            shutil.rmtree(place)


def _make_directory(wanted: Path | None) -> Path:
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix="tokcap-demo-"))
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        if any(wanted.iterdir()):
            raise DemoFailedError(f"{wanted} is not empty: name a new directory")
    except OSError as error:
        raise DemoFailedError(f"cannot use {wanted}: {error.strerror}") from error
    return wanted.resolve()


async def _until_signal(demo: _Demo) -> Report:
    """Run the demo; the first signal ends it, further ones wait until everything is cleaned up."""
    loop = asyncio.get_running_loop()
    running = asyncio.ensure_future(demo.run())
    received: list[int] = []

    def stop(number: int) -> None:
        if not received:
            received.append(number)
            running.cancel()

    # A signal that was ignored when the program started (nohup) stays ignored.
    heeded = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    for number in heeded:
        loop.add_signal_handler(number, stop, number)
    try:
        return await running
    except asyncio.CancelledError:
        if received:
            raise InterruptedDemoError(received[0]) from None
        raise
    finally:
        for number in heeded:
            loop.remove_signal_handler(number)


class _Demo:
    """One run in one directory."""

    def __init__(self, directory: Path, keep: bool, show: Show) -> None:
        self._directory = directory
        self._keep = keep
        self._show = show
        self._database = directory / "token_captures.db"
        self._rollouts = directory / "rollouts.jsonl"
        self._output = directory / "train.jsonl"

    async def run(self) -> Report:
        started = time.monotonic()
        rollouts = await self._agents()
        self._rollouts.write_text("".join(json.dumps(rollout.record()) + "\n" for rollout in rollouts))
        await self._finalize()
        from token_id_capture.cli.demo.checks import check

        self._show("checking every token", 0, None)
        outcomes = await check(rollouts, self._database, self._rows(), Policy(POLICY_SEED))
        return Report(
            directory=self._directory,
            kept=self._keep,
            seconds=time.monotonic() - started,
            outcomes=outcomes,
            rollouts=self._rollouts,
            output=self._output,
            database=self._database,
        )

    def _rows(self) -> list[bytes]:
        return self._output.read_bytes().splitlines()

    async def _agents(self) -> list[Rollout]:
        self._show("starting the model and the gateway", 0, None)
        async with (
            running_engine(self._directory, seed=POLICY_SEED, model=MODEL, hold=HELD_TEXT) as engine,
            running_gateway(self._directory, upstream=engine.url, database=self._database, workers=WORKERS) as gateway,
        ):
            # Loaded only now: the gateway's workers start meanwhile.
            from token_id_capture.cli.demo.journey import Journey

            return await Journey(gateway, engine, self._database, self._show).run()

    async def _finalize(self) -> None:
        self._show("finalizing", 0, None)
        code, said = await run_tokcap(
            *("finalize", str(self._rollouts), "--database", str(self._database)),
            *("--output", str(self._output), "--retire"),
        )
        if code != 0:
            raise DemoFailedError(f"tokcap finalize ended with exit code {code}: {said.strip()}")
