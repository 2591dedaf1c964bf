"""Programs of child processes whose disk fails for a moment; see ``child_server``."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from support.interposer import Control
from support.programs import entry, speaker
from token_id_capture.errors import TokenCaptureError
from token_id_capture.store import TokenCaptureStore
from token_id_capture.store.write import writer


def life_with_outages(database: str, acknowledged: str, control: str, second: str, trusting: bool, seed: int) -> None:
    """Puts through several outages: the log's sync fails, then a write to the database, or its sync, does.

    ``trusting`` goes on after an error as if a later sync would write what an earlier one did not.
    """
    say, faults, dice = speaker(acknowledged), Control(Path(control)), random.Random(seed)
    writer.IDLE_SECONDS = 0.02  # type: ignore[misc]
    if trusting:
        writer.settle = lambda connection, path, writer_lock: writer_lock.settled()  # type: ignore[attr-defined]

    async def put(store: TokenCaptureStore, call: str) -> None:
        try:
            await store.put(entry("first", call, dice.choice((4, 600))))
            say(f"put {call}")
        except TokenCaptureError as error:
            say(f"refused {call} {type(error).__name__}")

    async def part(number: int) -> None:
        async with TokenCaptureStore(database) as store:
            for step in range(12):
                if dice.random() < 0.4:
                    faults.log_sync_faults = 1
                    setattr(faults, second, 1)
                await asyncio.gather(*(put(store, f"{number}.{step}.{n}") for n in range(dice.choice((1, 1, 3)))))
                if dice.random() < 0.3:
                    await asyncio.sleep(0.06)
                faults.log_sync_faults = 0
                setattr(faults, second, 0)

    for number in range(3):
        asyncio.run(part(number))
    say("end")


def keep_open(database: str, acknowledged: str) -> None:
    """Have the database open, as another worker has, and do nothing."""

    async def main() -> None:
        async with TokenCaptureStore(database):
            speaker(acknowledged)("open")
            await asyncio.sleep(3600)

    asyncio.run(main())
