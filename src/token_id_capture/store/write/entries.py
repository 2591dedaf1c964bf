"""What a running rollout writes: entries, intents and flags. Set-based, one group at a time."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple

import orjson
from sqlalchemy import bindparam, column, delete, func, select, tuple_, union_all, update
from sqlalchemy.dialects.sqlite import insert

from token_id_capture import reasons
from token_id_capture.errors import ConflictingEntryError, RolloutFrozenError, RolloutRetiredError, StorageFullError
from token_id_capture.lifecycle import CALL_FIELDS, ORIGIN_FIELDS, UNTOLD, CallOrigin, IntentOutcome, State
from token_id_capture.provenance import HistoryLink
from token_id_capture.store.codec import PackedEntry, longest_prefix
from token_id_capture.store.schema import call_histories, call_intents, entries, incomplete_flags, late_writes, rollouts
from token_id_capture.store.write.queue import Batch, Job
from token_id_capture.store.write.statements import Statement

# A prompt that continues none of the longest earlier calls is stored whole; looking at them all
# would make a put cost more the longer the rollout is.
PREFIX_CANDIDATES: Final = 16


class Begun(NamedTuple):
    """The intent of a call: the incarnation that it was made in, and when (seconds since the epoch)."""

    incarnation: str
    at: float


@dataclass(slots=True, frozen=True)
class Put:
    """An entry to store; the incarnation that its prefix pointer was made in, and its intent if that is known here."""

    entry: PackedEntry
    prefix_incarnation: str | None
    begun: Begun | None
    history: HistoryLink | None = None


@dataclass(slots=True, frozen=True)
class Call:
    """A call that begins, or that the engine refused."""

    rollout_id: str
    model_call_id: str
    detail: str = ""
    origin: CallOrigin = UNTOLD


@dataclass(slots=True, frozen=True)
class Mark:
    """A reason why a rollout is incomplete."""

    rollout_id: str
    model_call_id: str
    reason: str
    detail: str


@dataclass(slots=True)
class Rollout:
    """The row of a rollout, as far as writes need it."""

    rollout_id: str
    incarnation: str
    state: State
    is_new: bool = False


def _json_values(name: str) -> Any:
    """A subquery over a JSON array of texts: one bound parameter for any number of values."""
    return select(column("value")).select_from(func.json_each(bindparam(name)))


_each_key = func.json_each(bindparam("keys")).table_valued("value")
_key = (
    func.json_extract(_each_key.c.value, "$[0]"),
    func.json_extract(_each_key.c.value, "$[1]"),
)

# One row for them all: see Statement.run_many.
SELECT_ROLLOUTS = Statement(
    select(
        func.json_group_array(func.json_array(rollouts.c.rollout_id, rollouts.c.incarnation, rollouts.c.state))
    ).where(rollouts.c.rollout_id.in_(_json_values("rollout_ids")))
)
SELECT_STORED = Statement(
    select(entries.c.rollout_id, entries.c.model_call_id, entries.c.payload_digest).where(
        tuple_(entries.c.rollout_id, entries.c.model_call_id).in_(select(*_key))
    )
)
_SELECT_CANDIDATES = Statement(
    select(entries.c.model_call_id, entries.c.sequence_length, entries.c.sequence_digest)
    .where(
        entries.c.rollout_id == bindparam("rollout"),
        entries.c.sequence_length <= bindparam("longest"),
        entries.c.generation_length > 0,
    )
    .order_by(entries.c.sequence_length.desc())
    .limit(PREFIX_CANDIDATES)
)
_INSERT_ROLLOUT = Statement(insert(rollouts), ["rollout_id", "incarnation", "state", "version", "opened_at"])
_INSERT_ENTRY = Statement(insert(entries))
_INSERT_HISTORY = Statement(insert(call_histories))
_OF_INTENT: Final = ("writer_id", "begun_at", "outcome", "detail", *CALL_FIELDS)
_new_intent = insert(call_intents)
# A call that is still open stays as it is; one that was refused and begins again is open again.
_INSERT_INTENT = Statement(
    _new_intent.on_conflict_do_update(
        index_elements=[call_intents.c.rollout_id, call_intents.c.model_call_id],
        set_={name: _new_intent.excluded[name] for name in _OF_INTENT},
        where=call_intents.c.outcome.is_not(None),
    )
)
_MEMBERS: Final = {kind: tuple(member.name for member in fields(kind)) for kind in (CallOrigin, HistoryLink)}
_INSERT_FLAG = Statement(
    insert(incomplete_flags),
    ["rollout_id", "model_call_id", "reason", "detail", "flagged_at", *CALL_FIELDS],
)
# A call is known by its intent while it is open, and by its entry once it is stored.
_SELECT_ORIGIN = Statement(
    union_all(
        *(
            select(*(table.c[name] for name in ORIGIN_FIELDS), headers).where(
                table.c.rollout_id == bindparam("rollout"), table.c.model_call_id == bindparam("call")
            )
            for table, headers in (
                (call_intents, call_intents.c.session_headers),
                (entries, func.json_extract(entries.c.extras, "$.session_headers")),
            )
        )
    ).limit(1)
)
_INSERT_LATE_WRITE = Statement(insert(late_writes).on_conflict_do_nothing())
_DELETE_INTENTS = Statement(
    delete(call_intents).where(tuple_(call_intents.c.rollout_id, call_intents.c.model_call_id).in_(select(*_key)))
)
_REFUSE_INTENT = Statement(
    update(call_intents)
    .where(
        call_intents.c.rollout_id == bindparam("rollout"),
        call_intents.c.model_call_id == bindparam("call"),
        call_intents.c.outcome.is_(None),
    )
    .values(outcome=IntentOutcome.REFUSED.value, detail=bindparam("said"))
)
_RAISE_VERSION = Statement(
    update(rollouts).where(rollouts.c.rollout_id == bindparam("rollout")).values(version=rollouts.c.version + 1)
)


def put_entries(batch: Batch, jobs: list[Job]) -> None:
    """Store entries. A job's result is the incarnation that its rollout is in."""
    known = _rollouts_of(batch, (job.payload.entry.rollout_id for job in jobs))
    stored = _stored_digests(batch, jobs)
    accepted: list[Job] = []
    repeated: list[PackedEntry] = []
    conflicts: list[Mark] = []
    for job in jobs:
        put: Put = job.payload
        entry = put.entry
        rollout = known.get(entry.rollout_id)
        key = entry.rollout_id, entry.model_call_id
        digest = entry.columns["payload_digest"]
        if rollout is not None and rollout.state == State.RETIRED:
            _refuse_late(batch, entry, State.RETIRED)
            job.error = RolloutRetiredError(entry.rollout_id, f"call {entry.model_call_id!r}")
        elif put.begun is not None and (rollout is None or rollout.incarnation != put.begun.incarnation):
            # The rollout was deleted since the call began: it belongs to no attempt that is left.
            _refuse_late(batch, entry, "deleted")
            job.error = RolloutRetiredError(entry.rollout_id, f"call {entry.model_call_id!r}, begun before its delete")
        elif stored.get(key) == digest:
            job.result = rollout.incarnation if rollout else None
            if rollout is not None and rollout.state == State.OPEN:
                repeated.append(entry)
        elif key in stored:
            conflicts.append(Mark(*key, reasons.CONFLICTING_PAYLOAD, "the first payload is kept"))
            job.error = ConflictingEntryError(*key)
        elif rollout is not None and rollout.state == State.FROZEN:
            _refuse_late(batch, entry, State.FROZEN)
            job.error = RolloutFrozenError(*key)
        elif batch.shortage:
            job.error = StorageFullError(
                f"call {entry.model_call_id!r} of rollout {entry.rollout_id!r} was not stored: {batch.shortage}"
            )
        else:
            if rollout is None:
                rollout = known[entry.rollout_id] = _new_rollout(entry.rollout_id)
            _point_to_prefix(batch, put, rollout)
            stored[key] = digest
            job.result = rollout.incarnation
            accepted.append(job)
    _insert_new(batch, known.values())
    for conflict in conflicts:
        # Not before: the first payload, and with it the rollout, may be of this group.
        _flag(batch, conflict)
    if accepted:
        _insert_entries(batch, [job.payload for job in accepted])
    if repeated:
        # The call may have begun again since it was stored.
        _DELETE_INTENTS.run(batch.connection, {"keys": _keys(repeated)})


def _insert_entries(batch: Batch, accepted: list[Put]) -> None:
    rows = [put.entry.row(batch.now, batch.writer_id, put.begun.at if put.begun else None) for put in accepted]
    _INSERT_ENTRY.run_many(batch.connection, rows)
    _INSERT_HISTORY.run_many(
        batch.connection, [_history_row(put.entry, put.history) for put in accepted if put.history]
    )
    _DELETE_INTENTS.run(batch.connection, {"keys": _keys(put.entry for put in accepted)})


def _history_row(entry: PackedEntry, history: HistoryLink) -> dict[str, Any]:
    return {"rollout_id": entry.rollout_id, "model_call_id": entry.model_call_id, **_columns(history)}


def _point_to_prefix(batch: Batch, put: Put, rollout: Rollout) -> None:
    entry = put.entry
    if entry.prefix_call_id is not None and put.prefix_incarnation == rollout.incarnation:
        return
    candidates: list[tuple[str, int, bytes]] = []
    if not rollout.is_new:
        parameters = {"rollout": entry.rollout_id, "longest": len(entry.prompt)}
        candidates = [(row[0], row[1], row[2]) for row in _SELECT_CANDIDATES.rows(batch.connection, parameters)]
    found = longest_prefix(entry.prompt, candidates) if candidates else None
    entry.prefix_call_id, entry.prefix_length = found if found is not None else (None, 0)


def _refuse_late(batch: Batch, entry: PackedEntry, state: str) -> None:
    values = {
        "rollout_id": entry.rollout_id,
        "model_call_id": entry.model_call_id,
        "state": state,
        "payload_digest": entry.columns["payload_digest"],
        "writer_id": batch.writer_id,
        "attempted_at": batch.now,
    }
    _INSERT_LATE_WRITE.run(batch.connection, values)


def begin_calls(batch: Batch, jobs: list[Job]) -> None:
    """Record intents. A job's result is the intent, as ``Begun``."""
    known = _rollouts_of(batch, (job.payload.rollout_id for job in jobs))
    begun: list[dict[str, Any]] = []
    for job in jobs:
        call: Call = job.payload
        rollout = known.get(call.rollout_id)
        if rollout is not None and rollout.state == State.RETIRED:
            job.error = RolloutRetiredError(call.rollout_id, f"the start of call {call.model_call_id!r}")
        elif rollout is not None and rollout.state == State.FROZEN:
            job.error = RolloutFrozenError(call.rollout_id, call.model_call_id)
        elif batch.shortage:
            # What it generates could not be stored, so it must not reach the engine.
            job.error = StorageFullError(
                f"call {call.model_call_id!r} of rollout {call.rollout_id!r} was not begun: {batch.shortage}"
            )
        else:
            if rollout is None:
                rollout = known[call.rollout_id] = _new_rollout(call.rollout_id)
            job.result = Begun(rollout.incarnation, batch.now)
            begun.append(
                {
                    "rollout_id": call.rollout_id,
                    "model_call_id": call.model_call_id,
                    "writer_id": batch.writer_id,
                    "begun_at": batch.now,
                    "outcome": None,
                    "detail": "",
                    **_columns(call.origin),
                    "session_headers": _json(call.origin.session_headers),
                }
            )
    _insert_new(batch, known.values())
    if begun:
        _INSERT_INTENT.run_many(batch.connection, begun)


def refuse_calls(batch: Batch, jobs: list[Job]) -> None:
    """End open intents as refused; those of a frozen rollout stay what its snapshot says they are."""
    known = _rollouts_of(batch, (job.payload.rollout_id for job in jobs))
    refused: list[dict[str, Any]] = []
    for job in jobs:
        call: Call = job.payload
        rollout = known.get(call.rollout_id)
        if rollout is None or rollout.state == State.OPEN:
            refused.append({"rollout": call.rollout_id, "call": call.model_call_id, "said": call.detail})
        elif rollout.state == State.FROZEN:
            job.error = RolloutFrozenError(call.rollout_id, call.model_call_id)
        else:
            job.error = RolloutRetiredError(call.rollout_id, f"the refusal of call {call.model_call_id!r}")
    if refused:
        _REFUSE_INTENT.run_many(batch.connection, refused)


def mark_incomplete(batch: Batch, mark: Mark) -> None:
    """Flag a rollout, which may be one that nobody has seen yet."""
    rollout = _rollouts_of(batch, [mark.rollout_id]).get(mark.rollout_id)
    if rollout is None:
        _insert_new(batch, [_new_rollout(mark.rollout_id)])
    elif rollout.state == State.RETIRED:
        raise RolloutRetiredError(mark.rollout_id, f"the flag {mark.reason!r} of call {mark.model_call_id!r}")
    _flag(batch, mark)


def _flag(batch: Batch, mark: Mark) -> None:
    origin = _SELECT_ORIGIN.row(batch.connection, {"rollout": mark.rollout_id, "call": mark.model_call_id})
    values = {
        "rollout_id": mark.rollout_id,
        "model_call_id": mark.model_call_id,
        "reason": mark.reason,
        "detail": mark.detail,
        "flagged_at": batch.now,
        **dict(zip(CALL_FIELDS, origin or (None,) * len(CALL_FIELDS), strict=True)),
    }
    _INSERT_FLAG.run(batch.connection, values)
    _RAISE_VERSION.run(batch.connection, {"rollout": mark.rollout_id})


def _rollouts_of(batch: Batch, rollout_ids: Iterable[str]) -> dict[str, Rollout]:
    parameters = {"rollout_ids": orjson.dumps(sorted(set(rollout_ids))).decode()}
    ((found,),) = SELECT_ROLLOUTS.rows(batch.connection, parameters)
    return {row[0]: Rollout(*row) for row in orjson.loads(found)}


def _stored_digests(batch: Batch, jobs: list[Job]) -> dict[tuple[str, str], bytes]:
    keys = _keys(job.payload.entry for job in jobs)
    return {(row[0], row[1]): row[2] for row in SELECT_STORED.rows(batch.connection, {"keys": keys})}


def _new_rollout(rollout_id: str) -> Rollout:
    return Rollout(rollout_id, uuid.uuid4().hex, State.OPEN, is_new=True)


def _insert_new(batch: Batch, known: Iterable[Rollout]) -> None:
    """Insert those rollouts that have no row yet."""
    rows = [
        {
            "rollout_id": rollout.rollout_id,
            "incarnation": rollout.incarnation,
            "state": rollout.state,
            "version": 0,
            "opened_at": batch.now,
        }
        for rollout in known
        if rollout.is_new
    ]
    _INSERT_ROLLOUT.run_many(batch.connection, rows)


def _keys(packed: Iterable[PackedEntry]) -> str:
    return orjson.dumps([[entry.rollout_id, entry.model_call_id] for entry in packed]).decode()


def checked_call_id(model_call_id: str) -> str:
    """The id of a call, if it is one.

    Raises:
        ValueError: it is not a text of 1 to 200 characters.
    """
    if not isinstance(model_call_id, str) or not 1 <= len(model_call_id) <= 200:
        raise ValueError(f"invalid model call id {model_call_id!r}: use a text of 1 to 200 characters")
    return model_call_id


def _json(headers: Mapping[str, str] | None) -> str | None:
    return orjson.dumps(dict(headers)).decode() if headers else None


def _columns(row: CallOrigin | HistoryLink) -> dict[str, Any]:
    """The members by name. ``asdict`` copies them deeply, which takes longer than the insert."""
    return {name: getattr(row, name) for name in _MEMBERS[type(row)]}
