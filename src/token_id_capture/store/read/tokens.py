"""Stored calls with their tokens: of a snapshot, of a rollout, or one by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar, TypeVarTuple

from token_id_capture.errors import RolloutRetiredError
from token_id_capture.lifecycle import Flag
from token_id_capture.protocols import TokenCaptureSnapshot
from token_id_capture.records import TokenEntry
from token_id_capture.store.codec import unpack_rollout
from token_id_capture.store.driver import Execute
from token_id_capture.store.read import queries

_Given = TypeVarTuple("_Given")
_Found = TypeVar("_Found")


class RowReader(Protocol):
    """What reads rows, in the thread that asks."""

    def read(self, query: Callable[[Execute, *_Given], _Found], *given: *_Given) -> _Found:
        """What a query answers; all its statements see one state."""
        ...


def ask(reader: RowReader, query: Callable[[Execute, *_Given], _Found], *given: *_Given) -> _Found:
    """What a query answers."""
    return reader.read(query, *given)


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """One version of a snapshot as it is stored: ``rows`` has the columns ``queries.ENTRY_ROW`` of each call."""

    rollout_id: str
    snapshot_id: str
    version: int
    flags: tuple[Flag, ...]
    rows: queries.Rows

    def unpack(self) -> TokenCaptureSnapshot:
        """The same with its calls as entries.

        Raises:
            CorruptCaptureError: a call in it is damaged.
        """
        entries = unpack_rollout(self.rollout_id, self.rows)
        return TokenCaptureSnapshot(
            self.rollout_id, entries, bool(self.flags), self.snapshot_id, self.version, self.flags
        )


def read_snapshot(reader: RowReader, rollout_id: str, snapshot_id: str, version: int) -> TokenCaptureSnapshot:
    """One version of a snapshot, with its calls as entries; else as ``stored_snapshot``."""
    return stored_snapshot(reader, rollout_id, snapshot_id, version).unpack()


def stored_snapshot(reader: RowReader, rollout_id: str, snapshot_id: str, version: int) -> StoredSnapshot:
    """One version of a snapshot.

    Raises:
        RolloutRetiredError: another process retired it meanwhile.
        CorruptCaptureError: the snapshot or a call in it is damaged.
    """
    found = reader.read(queries.snapshot, snapshot_id, version)
    if found is None:
        raise RolloutRetiredError(rollout_id, "reading its snapshot")
    rows, flags = found
    return StoredSnapshot(rollout_id, snapshot_id, version, flags, rows)


def entries_of_rollout(reader: RowReader, rollout_id: str) -> tuple[TokenEntry, ...]:
    """The calls as they are stored now; nothing is frozen."""
    return unpack_rollout(rollout_id, reader.read(queries.entry_rows, rollout_id))


def entry_of_call(reader: RowReader, rollout_id: str, model_call_id: str) -> TokenEntry | None:
    """One call; None if it is not stored. Only calls that its prompt is stored behind are read with it."""
    rows = reader.read(queries.rows_of_call, rollout_id, model_call_id)
    entries = unpack_rollout(rollout_id, rows)
    return next((entry for entry in entries if entry.model_call_id == model_call_id), None)
