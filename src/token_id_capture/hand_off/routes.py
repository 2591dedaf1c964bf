"""The routes that hand rollouts off, as an application of its own: a gateway serves it behind a key of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final, Self, TypeVar

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from token_id_capture.consumer import build_from_source
from token_id_capture.errors import (
    CorruptCaptureError,
    InvalidEntryError,
    RolloutRetiredError,
    StoreError,
    UnknownRolloutError,
)
from token_id_capture.finalize.row_format import MaskedRows
from token_id_capture.finalize.rows import RolloutLine, parse_record
from token_id_capture.hand_off import wire
from token_id_capture.hand_off.body import Body, BodyResponse
from token_id_capture.hand_off.rows import prepare_arrow, write_rows
from token_id_capture.integrations.nemo_gym import scored_answer
from token_id_capture.lifecycle import Outcome, Sequences, State
from token_id_capture.rebuild import build_snapshot
from token_id_capture.records import rollout_id_from_record, validate_rollout_id
from token_id_capture.server.http.errors import send_error
from token_id_capture.store import RolloutFilter, TokenCaptureStore
from token_id_capture.store.read.tokens import StoredSnapshot

_AT_ONCE: Final = 4
"""Rollouts that one worker reads or builds at a time; more wait, so that memory stays bounded."""
_LONGEST_BODY: Final = 64 * 2**20
_WAITING: Final = (State.OPEN, State.FROZEN)
# Starlette would refuse other methods in plain text.
_ANY: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

_Decoded = TypeVar("_Decoded")
_Choice = TypeVar("_Choice", Sequences, MaskedRows)
_STATUS: Final[tuple[tuple[type[Exception], int, wire.Code], ...]] = (
    (RolloutRetiredError, 410, wire.Code.RETIRED),
    (CorruptCaptureError, 500, wire.Code.CORRUPT),
    (InvalidEntryError, 422, wire.Code.INVALID),
    (StoreError, 503, wire.Code.UNAVAILABLE),
    (OSError, 503, wire.Code.UNAVAILABLE),
    (ClientDisconnect, 400, wire.Code.INVALID),  # the client is gone, and the gateway did nothing wrong
    (ValueError, 400, wire.Code.INVALID),
)
"""What errors are answered with: the first that fits."""


class Page(msgspec.Struct):
    """Rollouts in the order of their ids; ``next`` is what to ask behind, None at the end."""

    rollouts: list[Any]
    next: str | None


@dataclass(frozen=True)
class _Wanted:
    """What a request for rows asks for in its query."""

    sequences: Sequences
    masked: MaskedRows
    models: Collection[str] | None
    arrow: bool

    @classmethod
    def of(cls, request: Request) -> Self:
        query = request.query_params
        models = [name.strip() for name in query.get("models", "").split(",") if name.strip()]
        return cls(
            _choice(Sequences, query, "sequences", Sequences.MAIN),
            _choice(MaskedRows, query, "masked", MaskedRows.KEEP),
            models or None,
            wire.ARROW_STREAM in request.headers.get("accept", ""),
        )


class HandOff:
    """Hands the rollouts of ``store`` off. The server that mounts it opens and closes the store."""

    def __init__(self, store: TokenCaptureStore) -> None:
        self._store = store
        self._turns = asyncio.Semaphore(_AT_ONCE)
        prepare_arrow()

    def app(self) -> ASGIApp:
        """All routes; any other path is answered with 404."""
        one = f"{wire.ROLLOUTS}/{{rollout_id}}"
        routes = (
            (wire.ROLLOUTS, self._list, "GET"),
            (one, self._show, "GET"),
            (f"{one}/rows", self._rows, "POST"),
            (f"{one}/snapshot", self._snapshot, "POST"),
            (f"{one}/acknowledge", self._acknowledge, "POST"),
            (wire.OUTCOMES, self._record, "POST"),
        )
        return Router(
            [Route(path, _answering(work, method), methods=_ANY) for path, work, method in routes],
            default=_unknown_path,
            redirect_slashes=False,
        )

    async def _list(self, request: Request) -> ASGIApp:
        """What waits: rollouts that are not retired and of which no outcome is recorded."""
        after, told = request.query_params.get("after", ""), request.query_params.get("limit", "100")
        if not (told.isascii() and told.isdecimal() and 1 <= (limit := int(told[:5])) <= wire.MOST_LISTED):
            raise ValueError(f"limit must be a number from 1 to {wire.MOST_LISTED}")
        # Each state has an index in the order of the ids; tombstones, which may be very many, are never looked at.
        pages = [await self._store.list_rollouts(after, limit, RolloutFilter(state=state)) for state in _WAITING]
        found = sorted(chain.from_iterable(pages), key=lambda one: one.rollout_id)[:limit]
        waiting = [one for one in found if one.outcome is None]
        return _json(Page(waiting, found[-1].rollout_id if len(found) == limit else None))

    async def _show(self, request: Request) -> ASGIApp:
        return _json(await self._store.describe_rollout(_rollout_id(request)))

    async def _snapshot(self, request: Request) -> ASGIApp:
        """Freeze, and hand the calls off as they are stored."""
        rollout_id = _rollout_id(request)
        async with self._turns:
            snapshot = await self._store.freeze_stored(rollout_id)
            if snapshot is None:
                raise _unknown(rollout_id)
            body = await asyncio.to_thread(_encoded, snapshot)
        return BodyResponse(body, wire.SNAPSHOT, {})

    async def _rows(self, request: Request) -> ASGIApp:
        """Freeze, build, and hand the rows off. The body of the request may be the finished record."""
        rollout_id, wanted = _rollout_id(request), _Wanted.of(request)
        raw = await _body(request)
        async with self._turns:
            record, exact = await asyncio.to_thread(parse_record, raw or b"{}")
            if rollout_id_from_record(record) not in (None, rollout_id):
                raise ValueError(f"the record is of rollout {rollout_id_from_record(record)!r}, not of {rollout_id!r}")
            line = RolloutLine(0, raw, record, rollout_id, exact)
            build, body = await build_from_source(
                rollout_id,
                self._store,
                partial(write_rows, line, masked=wanted.masked, arrow=wanted.arrow),
                partial(build_snapshot, sequences=wanted.sequences, models=wanted.models, scored=scored_answer(record)),
            )
        if build.snapshot is None or build.is_of_unknown_rollout:
            body.close()
            raise build.error or _unknown(rollout_id)
        told = {
            wire.SNAPSHOT_ID: build.snapshot.snapshot_id,
            wire.SNAPSHOT_VERSION: str(build.snapshot.version),
            wire.OUTCOME: build.outcome.value,
            wire.REASON: build.reason,
        }
        return BodyResponse(body, wire.ARROW_STREAM if wanted.arrow else wire.JSON_LINES, told)

    async def _record(self, request: Request) -> ASGIApp:
        """What a consumer says became of a snapshot."""
        told = _decoded(await _body(request), wire.NewOutcome)
        await self._store.record_outcome(told.snapshot_id, told.version, told.outcome, told.reason, told.metrics)
        return _json({"recorded": True})

    async def _acknowledge(self, request: Request) -> ASGIApp:
        """Retire the rollout if this is its latest state: its consumer has the rows, durably."""
        rollout_id, state = _rollout_id(request), _decoded(await _body(request), wire.Acknowledgement)
        now = (await self._store.describe_rollout(rollout_id)).summary
        kept = now.snapshot_id == state.snapshot_id and now.outcome is not None and now.outcome.keeps_evidence
        if now.snapshot_id == state.snapshot_id and (state.delivered or not kept):
            with suppress(UnknownRolloutError):  # retired already: this is a repetition
                await self._store.record_outcome(state.snapshot_id, state.version, Outcome.DELIVERED)
        if await self._store.drop(rollout_id, snapshot_id=state.snapshot_id, version=state.version):
            return _json({"retired": True})
        if kept and not state.delivered:
            why = (
                f"rollout {rollout_id!r} was not retired: it is recorded as {now.outcome} and kept as evidence. If you "
                'were given deliverable rows of it, send "delivered": true with the acknowledgement.'
            )
            return _refusal(409, wire.Code.EVIDENCE, why)
        why = (
            f"rollout {rollout_id!r} was not retired: version {state.version} of snapshot {state.snapshot_id!r} is not "
            "its latest state. Ask for its rows again."
        )
        return _refusal(409, wire.Code.CHANGED, why)


def _choice(kind: type[_Choice], query: QueryParams, name: str, default: _Choice) -> _Choice:
    try:
        return kind(query.get(name, default.value))
    except ValueError:
        raise ValueError(f"{name} must be one of {', '.join(kind)}") from None


def _rollout_id(request: Request) -> str:
    return validate_rollout_id(request.path_params["rollout_id"])


def _unknown(rollout_id: str) -> UnknownRolloutError:
    return UnknownRolloutError(
        f"no rollout {rollout_id!r} is in the gateway's database: GET {wire.ROLLOUTS} lists those that wait"
    )


async def _body(request: Request) -> bytes:
    pieces, size = [], 0
    async for piece in request.stream():
        pieces.append(piece)
        size += len(piece)
        if size > _LONGEST_BODY:
            raise ValueError(f"the body is longer than {_LONGEST_BODY} bytes")
    return b"".join(pieces)


def _decoded(raw: bytes, kind: type[_Decoded]) -> _Decoded:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error


def _encoded(snapshot: StoredSnapshot) -> Body:
    body = Body()
    for frame in wire.encoded(snapshot):
        body.write(frame)
    return body


def _json(value: Any) -> Response:
    raw = msgspec.json.encode(value)
    headers = {"cache-control": "no-store", wire.DIGEST: wire.digest_header(wire.sha256(raw))}
    return Response(raw, 200, headers, media_type="application/json")


def _answering(work: Callable[[Request], Awaitable[ASGIApp]], method: str) -> Callable[[Request], Awaitable[Any]]:
    """An endpoint for one method that answers the errors of ``work`` too."""

    async def answer(request: Request) -> ASGIApp:
        if request.method != method and (method, request.method) != ("GET", "HEAD"):
            return _refusal(405, wire.Code.METHOD, f"Use {method} here.", allow=method)
        try:
            return await work(request)
        except UnknownRolloutError as error:
            # The store advises to use a command, which is on the gateway's machine.
            named = request.path_params.get("rollout_id")
            return _refusal(404, wire.Code.UNKNOWN, str(_unknown(named) if named else error))
        except Exception as error:
            for kind, status, code in _STATUS:
                if isinstance(error, kind):
                    return _refusal(status, code, str(error))
            raise

    return answer


def _refusal(status: int, code: wire.Code, message: str, **headers: str) -> ASGIApp:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send_error(scope, receive, send, status, message, code, **headers)

    return answer


async def _unknown_path(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        await send_error(scope, receive, send, 404, "The hand-off has no such path.", "not_found")
