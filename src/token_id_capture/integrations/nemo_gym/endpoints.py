"""What an unmodified NeMo Gym is configured with: a sink, a lineage resolver and a source.

Each owns a ``TokenCaptureStore`` of the same database; a worker builds its own, without an event
loop, and the first call opens the file. ::

    token_id_capture:
      enabled: true
      sink: token_id_capture.integrations.nemo_gym:CaptureSink
      sink_kwargs: {database: /data/captures.db}
      lineage_store: token_id_capture.integrations.nemo_gym:LineageStore
      lineage_store_kwargs: {database: /data/captures.db}

The collector's process needs the source as well: ``tokcap gym`` installs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from token_id_capture.errors import InvalidEntryError, UnknownRolloutError
from token_id_capture.integrations.nemo_gym.entries import (
    FINGERPRINT,
    Dumped,
    extra,
    is_delta,
    parent_of,
    to_entry,
    to_gym,
    whole,
)
from token_id_capture.integrations.nemo_gym.lineage import history_of, stamps
from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore

if TYPE_CHECKING:
    from nemo_gym.token_id_capture.protocols import LineageResolution
    from nemo_gym.token_id_capture.protocols import TokenCaptureSnapshot as GymSnapshot

REFUSED = "refused"


class CaptureSink:
    """Stores what a Gym model server captures: durable and visible to every process on return."""

    def __init__(self, database: str | Path) -> None:
        self._store = TokenCaptureStore(database)

    async def put(self, entry: Dumped | TokenEntry) -> None:
        """Store an entry of any class that has the fields. The same bytes again change nothing.

        Raises:
            ValueError: a field is malformed, a delta record's parent is not stored or does not match
                its digest, or the call id was used for another payload.
            RolloutFrozenError, RolloutRetiredError: the rollout takes no entries any more.
        """
        given = to_entry(entry)
        key = extra(given, FINGERPRINT)
        laid_out = await self._laid_out(given) if is_delta(given) else given
        await self._store.put(laid_out, history_of(key) if isinstance(key, str) and key else None)

    async def _laid_out(self, entry: TokenEntry) -> TokenEntry:
        parent_id = parent_of(entry)
        parent = None if parent_id is None else await self._store.read_call(entry.rollout_id, parent_id)
        if parent is None:
            raise InvalidEntryError(
                f"call {entry.model_call_id!r} of rollout {entry.rollout_id!r} holds only what follows call "
                f"{parent_id!r}, which is not stored: its prompt cannot be rebuilt"
            )
        return whole(entry, parent)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """Flag the rollout; works after freeze too.

        Raises:
            RolloutRetiredError: the rollout is retired.
        """
        await self._store.mark_incomplete(rollout_id, model_call_id)

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """Record the intent before dispatch.

        Raises:
            RolloutFrozenError, RolloutRetiredError, StoreError: the call must not be dispatched.
        """
        await self._store.begin_call(rollout_id, model_call_id)

    async def refuse_call(self, rollout_id: str, *, model_call_id: str, code: str) -> None:
        """Close the intent of a call that generated nothing. The same code again changes nothing.

        Raises:
            ValueError: the call was refused with another code.
            RolloutFrozenError, RolloutRetiredError: the rollout takes no refusals any more.
        """
        await self._store.refuse_call(rollout_id, model_call_id, code)
        detail = await self._store.describe_rollout(rollout_id)
        for intent in detail.intents:
            if intent.model_call_id == model_call_id and intent.outcome == REFUSED and intent.detail != code:
                raise ValueError(
                    f"call {model_call_id!r} of rollout {rollout_id!r} was refused as {intent.detail!r}, not {code!r}"
                )

    async def close(self) -> None:
        """Release the store. Idempotent."""
        await self._store.close()


class LineageStore:
    """Resolves which stored call a request continues, with the hashes of the installed Gym.

    A look-up asks an index for the calls with the request's key and reads only those; nothing is
    cached, so every worker sees every durable call.
    """

    def __init__(self, database: str | Path) -> None:
        self._store = TokenCaptureStore(database)

    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> LineageResolution:
        """The one call of the rollout that the request provably continues; never a guess.

        Raises:
            ValueError: the rollout id is malformed.
            StoreError: the database cannot be read.
        """
        from nemo_gym.token_id_capture.fingerprint import assistant_fingerprint
        from nemo_gym.token_id_capture.lineage import RolloutLineage
        from nemo_gym.token_id_capture.protocols import LineageMatch, LineageResolution
        from nemo_gym.token_id_capture.records import ParentResolutionStatus

        key = assistant_fingerprint(request_items)
        if not key:
            return LineageResolution(ParentResolutionStatus.ROOT)
        index = RolloutLineage()
        known: dict[str, TokenEntry] = {}
        for call in await self._store.find_calls(rollout_id, [history_of(key).chain]):
            stored = await self._store.read_call(rollout_id, call.model_call_id)
            if stored is not None:
                known[call.model_call_id] = stored
                index.add_entry(to_gym(stored, {}), store_tokens=False)
        status, node, reason = index.resolve_node(request_items)
        if status != ParentResolutionStatus.RESOLVED or node is None:
            return LineageResolution(status, reason=reason)
        parent = known[node.call_id]
        tokens = (*parent.prompt_token_ids, *parent.generation_token_ids)
        match = LineageMatch(
            model_call_id=node.call_id, cumulative_token_ids=tokens, digest=str(extra(parent, "digest") or "")
        )
        return LineageResolution(ParentResolutionStatus.RESOLVED, match=match)

    def is_process_shared(self) -> bool:
        """Always: the database is the only state."""
        return True

    async def close(self) -> None:
        """Release the store. Idempotent."""
        await self._store.close()


class CaptureSource:
    """Freezes and retires for Gym's collector; entries are of the installed Gym's class."""

    def __init__(self, database: str | Path) -> None:
        self._store = TokenCaptureStore(database)

    async def freeze(self, rollout_id: str) -> GymSnapshot:
        """The frozen rollout. Calls that our gateway captured get the parents that their tokens prove.

        Raises:
            RolloutRetiredError: the rollout is retired.
            StoreError: the database cannot be used, or the snapshot is damaged.
        """
        from nemo_gym.token_id_capture.protocols import TokenCaptureSnapshot as GymSnapshot

        snapshot = await self._store.freeze(rollout_id)
        stamped = stamps(snapshot.entries)
        by_id = {entry.model_call_id: entry for entry in snapshot.entries}
        entries = tuple(
            to_gym(entry, stamped.get(entry.model_call_id, {}), by_id.get(parent_of(entry) or ""))
            for entry in snapshot.entries
        )
        return GymSnapshot(
            rollout_id=rollout_id,
            entries=entries,
            incomplete=snapshot.incomplete,
            snapshot_id=snapshot.snapshot_id,
            version=snapshot.version,
        )

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Delete exactly this snapshot; False if anything changed since."""
        return await self._store.drop(rollout_id, snapshot_id=snapshot_id, version=version)

    async def delete(self, rollout_ids: list[str]) -> None:
        """Forget rollouts whole, before their ids are used again."""
        await self._store.delete(rollout_ids)

    async def close(self) -> None:
        """Release the store. Idempotent."""
        await self._store.close()


async def is_incomplete(store: TokenCaptureStore, rollout_id: str) -> bool:
    """Whether a flag or an open intent would mask the rollout now; False if nobody knows it."""
    try:
        summary = (await store.describe_rollout(rollout_id)).summary
    except UnknownRolloutError:
        return False
    return bool(summary.flags or summary.open_intents)
