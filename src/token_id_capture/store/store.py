"""``TokenCaptureStore``: the sink, the source and the evidence, in one database that processes share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import orjson

from token_id_capture import reasons
from token_id_capture.errors import UnusableDatabaseError
from token_id_capture.lifecycle import UNTOLD, CallOrigin, Outcome
from token_id_capture.protocols import TokenCaptureSnapshot
from token_id_capture.provenance import HistoryLink, KnownCall, StoredAnswer
from token_id_capture.recent import Newest
from token_id_capture.records import TokenEntry, validate_rollout_id
from token_id_capture.store.backend import Backend, Stamp
from token_id_capture.store.codec import WRITE_BYTES, pack, validated
from token_id_capture.store.file.location import FREE_SPACE_FLOOR, database_path
from token_id_capture.store.local import LocalFile
from token_id_capture.store.read import histories, listing, queries, tokens
from token_id_capture.store.read.listing import EVERY_ROLLOUT, RolloutFilter
from token_id_capture.store.read.summaries import RolloutDetail, RolloutSummary
from token_id_capture.store.server_url import ServerUrl, is_server_url, server_url
from token_id_capture.store.write import entries as writes
from token_id_capture.store.write import retirement, snapshot
from token_id_capture.store.write.prefix_cache import RecentSequences
from token_id_capture.store.write.probe import probe
from token_id_capture.store.write.queue import Operation, one_by_one, open_only
from token_id_capture.store.write.thread import Limits
from token_id_capture.tokens import TokenIds

_MARK: Final = one_by_one(writes.mark_incomplete)
_FREEZE: Final = one_by_one(snapshot.freeze)
_OUTCOME: Final = one_by_one(snapshot.record_outcome)
_DROP: Final = one_by_one(retirement.drop)
_REMOVE: Final = one_by_one(retirement.remove)
_SWEEP: Final = one_by_one(retirement.sweep_retired)

# Calls whose begin and put lie in this process; beyond it the oldest are forgotten, and with them
# only the check that their rollout was not deleted in between.
_REMEMBERED_CALLS: Final = 65_536

_Found = TypeVar("_Found")


class TokenCaptureStore:
    """Captured tokens in one database that several processes write at once: a file, or a PostgreSQL server.

    It is a ``TokenSink`` with call intents and a ``TokenSource`` with outcomes; ``protocols`` says
    what its methods promise. Nothing is opened before the first use, and each process opens for
    itself, also after ``fork``. Use it as ``async with TokenCaptureStore(path) as store``, or close it.

    Args:
        database: a directory (the file in it is ``token_captures.db``), a file, an ``sqlite:///`` URL of one, or the
            ``postgresql://`` URL of a database on a server (extra ``postgres``).
        create: whether a missing file, or missing tables on a server, are created.
        free_space_floor: with fewer free bytes than this on the disk of a file, ``begin_call`` and ``put`` are
            refused, so that flags, freezes and checkpoints still have room. It recovers by itself.
        max_bytes: the size that a database file may grow to, rounded to pages; None for no limit.
        file_id: the ``file_id`` of the store of another process that had the file open before this one.
            Then no other file is used, and none is created.

    Raises:
        ReplacedDatabaseError: the file was removed or replaced since this store, or the one of
            ``file_id``, opened it. A store never continues with another file.
        UnusableDatabaseError, and what is below it: on first use, if the database cannot be used.
    """

    def __init__(
        self,
        database: str | Path | ServerUrl,
        *,
        create: bool = True,
        free_space_floor: int = FREE_SPACE_FLOOR,
        max_bytes: int | None = None,
        file_id: str | None = None,
    ) -> None:
        limits = Limits(free_space_floor=free_space_floor, max_bytes=max_bytes)
        self._backend = _backend(database, limits, create=create, file_id=file_id)
        self._reset()

    def _reset(self) -> None:
        self._recent = RecentSequences()
        self._begun: Newest[tuple[str, str], writes.Begun] = Newest(_REMEMBERED_CALLS)

    @property
    def location(self) -> Path | ServerUrl:
        """Where the database is: the absolute path of a file, or a URL, which hides its password as text."""
        return self._backend.location

    @property
    def database(self) -> Path:
        """The absolute path of the database file.

        Raises:
            UnusableDatabaseError: the database is on a server; ``location`` tells which.
        """
        if isinstance(self.location, ServerUrl):
            raise UnusableDatabaseError(f"{self.location} is not a file: ask for the store's location")
        return self.location

    @property
    def file_id(self) -> str | None:
        """What tells this database from every other, and from its own backups; None before the first open."""
        return self._backend.file_id

    @property
    def weights(self) -> Stamp:
        """The weight version that a trainer has stamped, for all processes on this database."""
        return self._backend.weights

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    def __del__(self) -> None:
        backend = getattr(self, "_backend", None)
        writer = None if backend is None else backend.unclosed()
        if writer is not None:
            unclosed = f"unclosed TokenCaptureStore({str(self.location)!r})"
            warnings.warn(unclosed, ResourceWarning, stacklevel=2, source=self)
            writer.end()

    async def open(self) -> None:
        """Open now instead of on first use: create the database if need be, and bring it up to date."""
        await self._write(open_only, None)

    async def close(self) -> None:
        """Finish what waits, then close. Idempotent; nothing that was acknowledged is lost."""
        await self._backend.close()

    # The sink

    async def put(self, entry: TokenEntry, history: HistoryLink | None = None) -> None:
        """Store one call; durable and visible to every process when this returns."""
        self._check_process()
        entry = validated(entry)
        key = entry.rollout_id, entry.model_call_id
        known = self._recent.prefix_of(entry.rollout_id, entry.prompt_token_ids)
        packed = pack(entry, known[1] if known else None)
        put = writes.Put(packed, known[0] if known else None, self._begun.get(key), history)
        incarnation = await self._write(writes.put_entries, put, packed.size)
        # Not before: a put that fails may be tried again.
        self._begun.pop(key, None)
        self._recent.remember(incarnation, packed)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "", reason: str = "") -> None:
        """Flag the rollout; ``reason`` may continue with ``": "`` and particulars."""
        code, detail = reasons.split_reason(reason or reasons.UNSPECIFIED)
        mark = writes.Mark(validate_rollout_id(rollout_id), model_call_id, code, detail)
        await self._write(_MARK, mark, len(detail))

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """Record that a call is about to be dispatched."""
        await self.begin_attributed_call(rollout_id, model_call_id, UNTOLD)

    async def begin_attributed_call(self, rollout_id: str, model_call_id: str, origin: CallOrigin) -> None:
        """Record that a call is about to be dispatched, and whose it is; its flags will tell that too."""
        call = writes.Call(validate_rollout_id(rollout_id), writes.checked_call_id(model_call_id), origin=origin)
        self._begun[rollout_id, model_call_id] = await self._write(writes.begin_calls, call)

    async def refuse_call(self, rollout_id: str, model_call_id: str, detail: str = "") -> None:
        """End the intent of a call that the engine refused before it generated anything.

        Raises:
            RolloutFrozenError, RolloutRetiredError: the rollout takes no refusals any more.
        """
        self._begun.pop((rollout_id, model_call_id), None)
        await self._write(writes.refuse_calls, writes.Call(validate_rollout_id(rollout_id), model_call_id, detail))

    async def find_calls(self, rollout_id: str, chains: Sequence[bytes]) -> list[KnownCall]:
        """The calls of an open rollout that were stored with one of these chains."""
        return await self._backend.read_tokens(
            tokens.ask, histories.find_calls, validate_rollout_id(rollout_id), chains
        )

    async def answers_since(self, rollout_id: str, order: int) -> list[StoredAnswer]:
        """The assistant messages of the rollout's calls that were stored after ``order``."""
        return await self._backend.read_tokens(
            tokens.ask, histories.answers_since, validate_rollout_id(rollout_id), order
        )

    async def upstream_of(self, rollout_id: str) -> str | None:
        """The address of the engine that served the rollout's latest stored call; None if nobody told."""
        return await self._backend.read_tokens(tokens.ask, histories.upstream_of, validate_rollout_id(rollout_id))

    async def sequence_of(self, rollout_id: str, model_call_id: str) -> TokenIds | None:
        """The prompt and generation of a call; None if it is not stored."""
        known = self._recent.sequence_of(rollout_id, model_call_id)
        if known is not None:
            return known
        return await self._backend.read_tokens(
            tokens.ask, histories.sequence_of, validate_rollout_id(rollout_id), model_call_id
        )

    # The source

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """Close the rollout for writing and return its snapshot."""
        frozen = await self._frozen(rollout_id, tokens.read_snapshot)
        return frozen or TokenCaptureSnapshot(rollout_id, (), incomplete=False, snapshot_id="", version=0)

    async def freeze_stored(self, rollout_id: str) -> tokens.StoredSnapshot | None:
        """As ``freeze``, but with the calls as they are stored; None for a rollout that nobody has seen."""
        return await self._frozen(rollout_id, tokens.stored_snapshot)

    async def _frozen(
        self, rollout_id: str, read: Callable[[tokens.RowReader, str, str, int], _Found]
    ) -> _Found | None:
        head: snapshot.SnapshotHead | None = await self._write(_FREEZE, validate_rollout_id(rollout_id))
        self._recent.forget(rollout_id)
        if head is None:
            return None
        return await self._backend.read_tokens(read, head.rollout_id, head.snapshot_id, head.version)

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Delete the rollout if exactly this snapshot is its latest state."""
        dropped: bool = await self._write(_DROP, retirement.Drop(validate_rollout_id(rollout_id), snapshot_id, version))
        return dropped

    async def record_outcome(
        self, snapshot_id: str, version: int, outcome: str, reason: str = "", metrics: Mapping[str, Any] | None = None
    ) -> None:
        """Append a consumer's outcome on a snapshot."""
        if outcome not in snapshot.RECORDED_BY_CONSUMERS:
            raise ValueError(f"unknown outcome '{outcome}': it is one of {', '.join(snapshot.RECORDED_BY_CONSUMERS)}")
        details = orjson.dumps(dict(metrics or {}), option=orjson.OPT_SORT_KEYS).decode()
        new = snapshot.NewOutcome(snapshot_id, version, Outcome(outcome), reason, details)
        await self._write(_OUTCOME, new, len(details))

    # Administration

    async def retire(self, rollout_ids: Iterable[str]) -> retirement.Changed:
        """Delete rollouts whatever their state, and tombstone their ids against late writers.

        Returns:
            ``{"removed": [...], "absent": [...]}``; repeating it removes nothing.

        Raises:
            TypeError: a bare string.
            ValueError: an id is invalid; then nothing was changed.
        """
        return await self._remove(rollout_ids, keep_tombstone=True)

    async def delete(self, rollout_ids: Iterable[str]) -> retirement.Changed:
        """Delete rollouts whatever their state, and their tombstone too: before an id is used again.

        Returns and raises as ``retire`` does.
        """
        return await self._remove(rollout_ids, keep_tombstone=False)

    async def _remove(self, rollout_ids: Iterable[str], *, keep_tombstone: bool) -> retirement.Changed:
        if isinstance(rollout_ids, str | bytes):
            raise TypeError("rollout_ids must be a collection of ids, not one string")
        wanted = tuple(dict.fromkeys(validate_rollout_id(rollout_id) for rollout_id in rollout_ids))
        changed: retirement.Changed = await self._write(_REMOVE, retirement.Removal(wanted, keep_tombstone))
        for rollout_id in wanted:
            self._recent.forget(rollout_id)
        return changed

    async def sweep_retired(self, older_than_seconds: float) -> int:
        """Remove the tombstones of rollouts retired longer ago than this; returns how many."""
        swept: int = await self._write(_SWEEP, older_than_seconds)
        return swept

    # Reading

    async def read_entries(self, rollout_id: str) -> tuple[TokenEntry, ...]:
        """The entries stored so far, in the order of their storing; empty if there are none.

        Raises:
            CorruptCaptureError: stored tokens do not match their digest.
        """
        return await self._backend.read_tokens(tokens.entries_of_rollout, validate_rollout_id(rollout_id))

    async def read_call(self, rollout_id: str, model_call_id: str) -> TokenEntry | None:
        """One stored call with its whole prompt; None if it is not stored. Costs the length of its sequence.

        Raises:
            CorruptCaptureError: the call, or one that its prompt is stored behind, is damaged.
        """
        return await self._backend.read_tokens(tokens.entry_of_call, validate_rollout_id(rollout_id), model_call_id)

    async def list_rollouts(
        self, after: str = "", limit: int = 50, wanted: RolloutFilter = EVERY_ROLLOUT
    ) -> list[RolloutSummary]:
        """A page of rollouts in the order of their ids, beginning behind ``after``."""
        return await self._backend.read(listing.list_rollouts, after, limit, wanted)

    async def describe_rollout(self, rollout_id: str) -> RolloutDetail:
        """Everything stored about one rollout except its tokens.

        Raises:
            UnknownRolloutError: it is not in the database.
        """
        return await self._backend.read(queries.describe_rollout, validate_rollout_id(rollout_id))

    # What a server watches

    async def check_writable(self) -> None:
        """Return once a put would succeed now.

        Raises:
            StoreError: it would fail; the message says why.
        """
        await self._write(probe, None)

    def waiting(self) -> tuple[int, int]:
        """How many writes of this process wait for the writer, and their bytes."""
        return self._backend.waiting()

    def wal_bytes(self) -> int:
        """The size of the write-ahead log in bytes; 0 on a server, which looks after its own."""
        return self._backend.log_bytes()

    # The database

    async def _write(self, operation: Operation, payload: Any, content: int = 0) -> Any:
        self._check_process()
        return await self._backend.write(operation, payload, WRITE_BYTES + content)

    def _check_process(self) -> None:
        if self._backend.check_process():
            self._reset()


def _backend(database: str | Path | ServerUrl, limits: Limits, *, create: bool, file_id: str | None) -> Backend:
    if isinstance(database, Path) or not is_server_url(database):
        return LocalFile(database_path(str(database)), limits, create=create, file_id=file_id)
    # Imported here, since its driver is an extra.
    from token_id_capture.store.postgres.backend import PostgresServer

    return PostgresServer(server_url(database), limits, create=create, file_id=file_id)
