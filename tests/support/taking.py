"""A trainer elsewhere that takes rollouts from a gateway, and a network between them that breaks."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import AsyncIterator, Callable
from urllib.parse import urlsplit

from token_id_capture.cli.options import output_stream
from token_id_capture.finalize.batch import Finalizer, Plan
from token_id_capture.finalize.publication import RowsOutput
from token_id_capture.finalize.row_format import RowFormat
from token_id_capture.hand_off import HandOffClient
from token_id_capture.outputs.destination import Destination


def take(gateway: str, key: str, rollouts: str, output: str) -> None:
    """``tokcap finalize --gateway --retire``, as a program of ``child_server``; exit code 1 if work is left."""

    async def main() -> bool:
        to = RowsOutput(Destination(output), output_stream)
        plan = Plan(output=to, row_format=RowFormat.TRAJECTORY, retire=True)
        client = HandOffClient(gateway, key, patience=10)
        with open(rollouts, "rb") as stream:  # noqa: ASYNC230  a short file
            totals = await Finalizer(plan, client, lambda done: None, print).run(stream)
        print(totals)
        return totals.complete

    sys.exit(not asyncio.run(main()))


class BreakingNetwork:
    """Passes bytes on in both directions; each connection ends after a number of bytes that chance chooses.

    ``on_break`` is called at each end, before the connections are reset.
    """

    def __init__(self, target: str, chance: random.Random, longest: int, on_break: Callable[[], None]) -> None:
        parts = urlsplit(target)
        self._target = parts.hostname, parts.port
        self._chance = chance
        self._longest = longest
        self._on_break = on_break
        self.breaks = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Its own address."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = self._chance.randint(1, self._longest)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            nonlocal left
            while left > 0 and (piece := await source.read(min(left, 4096))):
                left -= len(piece)
                sink.write(piece)
                await sink.drain()

        with contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            pumps = [asyncio.create_task(pump(reader, far_writer)), asyncio.create_task(pump(far_reader, writer))]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                if left <= 0:
                    self.breaks += 1
                    self._on_break()
            finally:
                for task in pumps:
                    task.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
                far_writer.transport.abort()
        writer.transport.abort()
