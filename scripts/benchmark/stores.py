"""What is compared: our store, plain JSON lines, and the limit that the disk sets.

Each takes the calls of its own ``form`` of the inputs. ``handle`` takes one call from JSON bytes to
durable, and gives the seconds that the storing itself took.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

import orjson

from benchmark.inputs import Call, record_of


class Contestant(Protocol):
    """A store under test. Heavy modules are imported when it is made: before the clock."""

    form: str

    async def open(self) -> None:
        """Get ready to store; the clock does not run yet."""
        ...

    async def handle(self, call: Call) -> float:
        """Parse and store one call; returns the seconds from the parsed call to durable."""
        ...

    async def close(self) -> None:
        """Finish."""
        ...


class Ours:
    """``TokenCaptureStore``, through its public interface."""

    form = "arrays"

    def __init__(self, directory: Path) -> None:
        from token_id_capture import TokenCaptureStore, TokenEntry

        self._entry = TokenEntry
        self.store = TokenCaptureStore(directory)

    async def open(self) -> None:
        await self.store.open()

    async def handle(self, call: Call) -> float:
        entry = self._entry(**_record(call, orjson.loads(call.body)))
        start = time.perf_counter()
        await self.store.put(entry)
        return time.perf_counter() - start

    async def close(self) -> None:
        await self.store.close()


class JsonLines:
    """The plain way: a line of JSON for each call, appended to its rollout's file and fsynced."""

    form = "arrays"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, FileIO] = {}

    async def open(self) -> None:
        pass

    async def handle(self, call: Call) -> float:
        return await self.append(_record(call, orjson.loads(call.body)))

    async def append(self, record: dict[str, Any]) -> float:
        """Make one record durable, in asyncio's default executor."""
        start = time.perf_counter()
        await asyncio.get_running_loop().run_in_executor(None, self._append, record)
        return time.perf_counter() - start

    def _append(self, record: dict[str, Any]) -> None:
        line = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
        rollout_id = record["rollout_id"]
        file = self._files.get(rollout_id)
        if file is None:
            # Kept open, which is cheaper than opening it for each call. Calls of a rollout come in turn.
            file = self._files[rollout_id] = FileIO(self._directory / f"{rollout_id}.jsonl", "ab")
        file.write(line)
        os.fsync(file.fileno())

    async def close(self) -> None:
        for file in self._files.values():
            file.close()


class Limit:
    """What the disk allows: packed bytes, appended to one file by one thread, one fdatasync a group."""

    form = "packed"

    def __init__(self, directory: Path) -> None:
        self._path = directory / "limit"
        self._waiting: queue.SimpleQueue[tuple[bytes, asyncio.Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def handle(self, call: Call) -> float:
        start = time.perf_counter()
        durable: asyncio.Future[None] = self._loop.create_future()
        self._waiting.put((call.body, durable))
        await durable
        return time.perf_counter() - start

    def _run(self) -> None:
        with FileIO(self._path, "ab") as file:
            while (first := self._waiting.get()) is not None:
                group = [first]
                while not self._waiting.empty() and (following := self._waiting.get()) is not None:
                    group.append(following)
                file.write(b"".join(body for body, _ in group))
                os.fdatasync(file.fileno())
                self._loop.call_soon_threadsafe(_resolve, [future for _, future in group])

    async def close(self) -> None:
        self._waiting.put(None)
        self._thread.join()


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        future.set_result(None)


def _record(call: Call, fields: dict[str, Any]) -> dict[str, Any]:
    arrays = fields["prompt_token_ids"], fields["generation_token_ids"], fields["generation_log_probs"]
    return record_of(call, *arrays, fields["text"])
