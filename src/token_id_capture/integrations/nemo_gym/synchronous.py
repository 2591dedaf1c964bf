"""The store under the names and the calling convention of Gym's file store.

Gym's own code and tests call some methods without awaiting them. They run here on an event loop in a
thread of the store's own, so they may be called from anywhere, also while a loop runs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from token_id_capture.integrations.nemo_gym.endpoints import CaptureSink, CaptureSource, is_incomplete
from token_id_capture.integrations.nemo_gym.entries import Dumped, parent_of, to_gym
from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore as Store
from token_id_capture.store import make_token_store as configured_store

if TYPE_CHECKING:
    from nemo_gym.token_id_capture.protocols import TokenCaptureSnapshot as GymSnapshot
    from nemo_gym.token_id_capture.records import TokenEntry as GymEntry

_Result = TypeVar("_Result")


class _Loop:
    """An event loop in a daemon thread, started on first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="nemo-gym-store", daemon=True).start()
            loop = self._loop
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    async def run_async(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return await asyncio.to_thread(self.run, work)

    def stop(self) -> None:
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)


class TokenCaptureStore:
    """Gym's file store by name. ``root`` is the directory that holds the database, or a database file."""

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root)
        if not self._root.suffix:
            self._root.mkdir(parents=True, exist_ok=True)
        self._loop = _Loop()
        self._store = Store(self._root)
        self._sink = CaptureSink(self._root)
        self._source = CaptureSource(self._root)

    @property
    def root(self) -> Path:
        """The directory of the database."""
        return self._root

    def append(self, entry: Dumped | TokenEntry) -> None:
        """Store an entry; durable on return.

        Raises:
            ValueError: the entry is malformed, or its call id was used for another payload.
            RolloutFrozenError, RolloutRetiredError: the rollout takes no entries any more.
        """
        self._loop.run(self._sink.put(entry))

    def read_entries(self, rollout_id: str) -> list[GymEntry]:
        """The stored entries in the order in which they were stored; nothing is frozen."""
        entries = self._loop.run(self._store.read_entries(rollout_id))
        by_id = {entry.model_call_id: entry for entry in entries}
        return [to_gym(entry, {}, by_id.get(parent_of(entry) or "")) for entry in entries]

    def freeze_now(self, rollout_id: str) -> GymSnapshot:
        """Freeze without awaiting."""
        return self._loop.run(self._source.freeze(rollout_id))

    def is_incomplete(self, rollout_id: str) -> bool:
        """Whether the rollout would be masked if it were frozen now."""
        return self._loop.run(is_incomplete(self._store, rollout_id))

    def delete(self, rollout_id: str) -> None:
        """Forget one rollout whole, its tombstone included."""
        self._loop.run(self._store.delete([rollout_id]))

    def sweep_retired(self, older_than_seconds: float) -> int:
        """Remove old tombstones; the number that went."""
        return self._loop.run(self._store.sweep_retired(older_than_seconds))

    async def put(self, entry: Dumped | TokenEntry) -> None:
        """As ``append``."""
        await asyncio.to_thread(self.append, entry)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """Flag the rollout."""
        await self._loop.run_async(self._sink.mark_incomplete(rollout_id, model_call_id))

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """Record the intent before dispatch."""
        await self._loop.run_async(self._sink.begin_call(rollout_id, model_call_id))

    async def freeze(self, rollout_id: str) -> GymSnapshot:
        """The frozen rollout."""
        return await asyncio.to_thread(self.freeze_now, rollout_id)

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Delete exactly this snapshot; False if anything changed since."""
        return await self._loop.run_async(self._source.drop(rollout_id, snapshot_id=snapshot_id, version=version))

    def stop(self) -> None:
        """As ``close``, without awaiting."""
        self._loop.run(self._close())
        self._loop.stop()

    async def close(self) -> None:
        """Release everything. Idempotent."""
        await asyncio.to_thread(self.stop)

    async def _close(self) -> None:
        for part in (self._sink, self._source, self._store):
            await part.close()


def make_token_store(global_config_dict: Any) -> TokenCaptureStore | None:
    """The store that a global configuration means; None where ours would be None."""
    store = configured_store(global_config_dict or {})
    return None if store is None else TokenCaptureStore(store.database)
