"""A store in memory that keeps every promise of ``protocols`` except durability, for the tests of users and for ours.

It passes ``token_id_capture.testing.contract``; what a test breaks in it on purpose, the suite must notice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from token_id_capture.errors import ConflictingEntryError, RolloutFrozenError, RolloutRetiredError, UnknownRolloutError
from token_id_capture.protocols import TokenCaptureSnapshot
from token_id_capture.records import TokenEntry


class MemoryRollout:
    """One rollout of a ``MemoryStore``."""

    def __init__(self) -> None:
        self.entries: dict[str, TokenEntry] = {}
        self.intents: set[str] = set()
        self.marks = 0
        self.frozen_id = ""
        self.frozen_version = 0
        self.outcome = ""
        self.retired: tuple[str, int] | None = None


class MemoryStore:
    """A sink with intents and a source with outcomes, as short as they can be; a dictionary for a disk.

    Stores that share ``rollouts`` are processes that share a file.
    """

    def __init__(self, rollouts: dict[str, MemoryRollout] | None = None) -> None:
        self.rollouts = {} if rollouts is None else rollouts

    def live(self, rollout_id: str, action: str) -> MemoryRollout:
        """The rollout, which nobody has retired."""
        rollout = self.rollouts.setdefault(rollout_id, MemoryRollout())
        if rollout.retired:
            raise RolloutRetiredError(rollout_id, action)
        return rollout

    async def put(self, entry: TokenEntry) -> None:
        """Keep the call, unless its rollout is closed."""
        rollout = self.live(entry.rollout_id, "put")
        known = rollout.entries.get(entry.model_call_id)
        if known is not None and known != entry:
            rollout.marks += 1
            raise ConflictingEntryError(entry.rollout_id, entry.model_call_id)
        if known is None and rollout.frozen_id:
            raise RolloutFrozenError(entry.rollout_id, entry.model_call_id)
        rollout.entries.setdefault(entry.model_call_id, entry)
        rollout.intents.discard(entry.model_call_id)

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """Open the intent."""
        rollout = self.live(rollout_id, "begin_call")
        if rollout.frozen_id:
            raise RolloutFrozenError(rollout_id, model_call_id)
        rollout.intents.add(model_call_id)

    async def refuse_call(self, rollout_id: str, model_call_id: str, detail: str = "") -> None:
        """Close the intent without a call."""
        rollout = self.live(rollout_id, "refuse_call")
        if rollout.frozen_id:
            raise RolloutFrozenError(rollout_id, model_call_id)
        rollout.intents.discard(model_call_id)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "", reason: str = "") -> None:
        """Raise the version."""
        self.live(rollout_id, "mark_incomplete").marks += 1

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """Close the rollout; what it holds."""
        if rollout_id not in self.rollouts:
            return TokenCaptureSnapshot(rollout_id, (), incomplete=False, snapshot_id="", version=0)
        rollout = self.live(rollout_id, "freeze")
        rollout.frozen_id = rollout.frozen_id or f"snapshot of {rollout_id} {id(rollout)}"
        rollout.frozen_version = rollout.marks
        incomplete = bool(rollout.marks or rollout.intents)
        entries = tuple(rollout.entries.values())
        return TokenCaptureSnapshot(rollout_id, entries, incomplete, rollout.frozen_id, rollout.marks)

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Forget the rollout if this is its latest state, and nothing says that it must be kept."""
        rollout = self.rollouts.get(rollout_id, MemoryRollout())
        if rollout.retired:
            return rollout.retired == (snapshot_id, version)
        if not snapshot_id or (snapshot_id, version) != (rollout.frozen_id, rollout.marks):
            return False
        if version != rollout.frozen_version or rollout.outcome in ("masked", "failed"):
            return False
        rollout.entries, rollout.retired = {}, (snapshot_id, version)
        return True

    async def record_outcome(
        self,
        snapshot_id: str,
        version: int,
        outcome: str,
        reason: str = "",
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Keep the latest outcome."""
        if outcome not in ("delivered", "masked", "failed"):
            raise ValueError(f"unknown outcome {outcome}")
        for rollout in self.rollouts.values():
            if (rollout.frozen_id, rollout.marks) == (snapshot_id, version):
                rollout.outcome = outcome
                return
        raise UnknownRolloutError(snapshot_id)

    async def delete(self, rollout_ids: list[str]) -> None:
        """Forget rollouts, tombstones included."""
        for rollout_id in rollout_ids:
            self.rollouts.pop(rollout_id, None)

    async def close(self) -> None:
        """Nothing to release."""
