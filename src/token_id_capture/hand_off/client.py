"""The client of a gateway's hand-off: a ``TokenSource`` whose rollouts are on another machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Self, TypeAlias, TypeVar

import aiohttp
import msgspec
import orjson
from yarl import URL

from token_id_capture.errors import (
    ConfigurationError,
    CorruptCaptureError,
    HandOffError,
    RolloutRetiredError,
    UnknownRolloutError,
)
from token_id_capture.hand_off import wire
from token_id_capture.lifecycle import Outcome, Sequences
from token_id_capture.protocols import TokenCaptureSnapshot
from token_id_capture.rebuild import SnapshotRef
from token_id_capture.records import validate_rollout_id
from token_id_capture.store.read.summaries import RolloutDetail, RolloutSummary

_FIRST_PAUSE: Final = 0.2
_LONGEST_PAUSE: Final = 5.0
_AGAIN: Final = frozenset({429, 502, 503, 504})
"""Statuses of which a later try may give another answer."""
# No limit on the whole: a large rollout over a slow line takes as long as it takes.
_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=300)

_Kind = TypeVar("_Kind")
Query: TypeAlias = Mapping[str, str | int]


@dataclass(frozen=True)
class HandedRows:
    """The rows of one rollout, whole.

    ``outcome`` is deliverable, masked or failed and ``reason`` the code why. ``snapshot`` is what to acknowledge, once
    the rows are durable and only if they are deliverable. ``body`` is JSON lines, or an Arrow stream if that was asked.
    """

    snapshot: SnapshotRef
    outcome: Outcome
    reason: str
    body: bytes

    def rows(self) -> list[dict[str, Any]]:
        """The JSON lines, parsed."""
        return [orjson.loads(line) for line in self.body.splitlines()]


@dataclass(frozen=True)
class _Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def decoded(self, kind: type[_Kind]) -> _Kind:
        try:
            return msgspec.json.decode(self.body, type=kind)
        except msgspec.MsgspecError as error:
            raise HandOffError(f"the gateway sent something other than was asked for: {error}") from error


class _AgainError(Exception):
    """This try failed, and a later one may not."""


class _Page(msgspec.Struct):
    rollouts: list[RolloutSummary]
    next: str | None


class HandOffClient:
    """Takes finished rollouts from a gateway that was started with ``--hand-off-key-file``.

    A ``TokenSource`` that records outcomes, so that everything that takes one works with it. Use it as
    ``async with HandOffClient(url, key) as source``, in one event loop. Nothing that it asks happens twice: after an
    error, or in another process after this one was killed, ask the same again.

    Args:
        gateway: its address, as in ``http://10.0.0.5:8400``.
        key: the key of the hand-off; the key of agents does not open it.
        patience: how many seconds a request is tried again while the gateway cannot be reached, is restarted, or
            sends a body that is not whole.

    Raises:
        ConfigurationError: the address is no URL.
        HandOffError: any request, when its patience is over; or at once, if the gateway refuses the key.
    """

    def __init__(self, gateway: str, key: str, *, patience: float = 30.0) -> None:
        self._url = _parsed(gateway)
        self._headers = {"authorization": f"Bearer {key}", "accept-encoding": "identity"}
        self._patience = patience
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Find out whether the gateway hands anything off to this key."""
        try:
            await self._ask("GET", wire.ROLLOUTS, query={"limit": 1})
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    # The source

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """Close the rollout for writing and return its snapshot, every call of it checked against its digests.

        Raises:
            RolloutRetiredError: the rollout was retired.
            CorruptCaptureError: stored tokens do not match their digest; the message names the call.
        """
        try:
            answer = await self._ask("POST", _path(rollout_id, "snapshot"))
        except UnknownRolloutError:
            return TokenCaptureSnapshot(rollout_id, (), incomplete=False, snapshot_id="", version=0)
        snapshot = await asyncio.to_thread(lambda: wire.decoded(answer.body).unpack())
        if snapshot.rollout_id != rollout_id:
            raise HandOffError(f"the gateway sent rollout {snapshot.rollout_id!r} in place of {rollout_id!r}")
        return snapshot

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Acknowledge: delete the rollout if exactly this snapshot is its latest state; else return False.

        Call it once the rows are durable. The delivery is recorded with it, if no outcome forbids one. False also while
        the latest outcome of the snapshot is masked or failed. Repeating a drop that succeeded returns True.

        Raises:
            UnknownRolloutError: it is not in the database.
        """
        return await self._retire(SnapshotRef(rollout_id, snapshot_id, version), delivered=False)

    async def acknowledge(self, handed: HandedRows | SnapshotRef) -> bool:
        """``drop`` of what ``rows`` gave, or of the state that it named.

        Deliverable rows are recorded as delivered even if another build of the same state, of other models or with
        another scored response, is recorded as masked. A state alone says nothing of its rows, so it is then kept.
        """
        if isinstance(handed, SnapshotRef):
            return await self._retire(handed, delivered=False)
        return await self._retire(handed.snapshot, delivered=handed.outcome is Outcome.DELIVERABLE)

    async def _retire(self, state: SnapshotRef, *, delivered: bool) -> bool:
        told = msgspec.json.encode(wire.Acknowledgement(state.snapshot_id, state.version, delivered))
        answer = await self._ask("POST", _path(state.rollout_id, "acknowledge"), told, also=409)
        return answer.status == 200

    async def record_outcome(
        self, snapshot_id: str, version: int, outcome: str, reason: str = "", metrics: Mapping[str, Any] | None = None
    ) -> None:
        """Append what became of a snapshot: ``delivered``, ``masked`` or ``failed``.

        Raises:
            ValueError: an unknown outcome.
            UnknownRolloutError: no snapshot has this id and version.
        """
        told = wire.NewOutcome(snapshot_id, version, Outcome(outcome), reason, dict(metrics or {}))
        await self._ask("POST", wire.OUTCOMES, msgspec.json.encode(told))

    # What a trainer asks beside

    async def describe_rollout(self, rollout_id: str) -> RolloutDetail:
        """Everything stored about one rollout except its tokens.

        Raises:
            UnknownRolloutError: it is not in the database.
        """
        return (await self._ask("GET", _path(rollout_id))).decoded(RolloutDetail)

    async def waiting(self, page: int = 100) -> AsyncIterator[RolloutSummary]:
        """The rollouts of which no outcome is recorded, open ones among them, in the order of their ids.

        They are asked for ``page`` at a time.
        """
        after: str | None = ""
        while after is not None:
            found = (await self._ask("GET", wire.ROLLOUTS, query={"after": after, "limit": page})).decoded(_Page)
            for one in found.rollouts:
                yield one
            after = found.next

    async def rows(
        self,
        rollout_id: str,
        record: Mapping[str, Any] | None = None,
        *,
        sequences: Sequences = Sequences.MAIN,
        models: Collection[str] | None = None,
        arrow: bool = False,
    ) -> HandedRows:
        """Freeze the rollout, and have the gateway build its rows.

        Args:
            record: the finished record: it says which response was scored, and its fields come back in JSON rows.
            sequences, models: as for ``build_snapshot``.
            arrow: an Arrow stream, with the columns of ``tokcap export``, instead of JSON lines.

        Raises:
            RolloutRetiredError, CorruptCaptureError: as for ``freeze``.
            UnknownRolloutError: it is not in the database.
        """
        accept = wire.ARROW_STREAM if arrow else wire.JSON_LINES
        wanted = {"sequences": sequences.value, "models": ",".join(models or ())}
        sent = b"" if record is None else orjson.dumps(record)
        answer = await self._ask("POST", _path(rollout_id, "rows"), sent, accept=accept, query=wanted)
        ref = SnapshotRef(rollout_id, answer.headers[wire.SNAPSHOT_ID], int(answer.headers[wire.SNAPSHOT_VERSION]))
        return HandedRows(ref, Outcome(answer.headers[wire.OUTCOME]), answer.headers[wire.REASON], answer.body)

    # Requests

    async def _ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        accept: str = "*/*",
        also: int = 200,
        query: Query | None = None,
    ) -> _Answer:
        """The whole answer of status 200 or ``also``; tried again for as long as the patience lasts."""
        clock = asyncio.get_running_loop().time
        deadline, pause = clock() + self._patience, _FIRST_PAUSE
        while True:
            try:
                answer = await self._try(method, path, body, accept, query)
                break
            except (_AgainError, aiohttp.ClientError, TimeoutError, OSError) as error:
                if clock() + pause > deadline:
                    said = str(error) or type(error).__name__
                    raise HandOffError(f"{method} {path} of the gateway at {self._url} failed: {said}") from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        if answer.status not in (200, also):
            self._refuse(answer, path)
        return answer

    async def _try(self, method: str, path: str, body: bytes, accept: str, query: Query | None) -> _Answer:
        session = self._session = self._session or aiohttp.ClientSession(timeout=_TIMEOUT)
        headers = {**self._headers, "accept": accept}
        url = self._url.joinpath(path.lstrip("/"))
        async with session.request(
            method, url, data=body or None, params=query, headers=headers, allow_redirects=False
        ) as response:
            raw = await response.read()
        answer = _Answer(response.status, response.headers, raw)
        if response.status in _AGAIN:
            raise _AgainError(_message(answer))
        if response.status == 200 and response.headers.get(wire.DIGEST) != wire.digest_header(wire.sha256(raw)):
            raise _AgainError(f"{len(raw)} bytes came, which are not what the gateway sent")
        return answer

    def _refuse(self, answer: _Answer, path: str) -> NoReturn:
        message, code = _message(answer), _error(answer).get("code")
        if code == wire.Code.UNKNOWN:
            raise UnknownRolloutError(message)
        if code == wire.Code.RETIRED:
            raise RolloutRetiredError(path.removeprefix(f"{wire.ROLLOUTS}/").partition("/")[0], "a hand-off")
        if code == wire.Code.CORRUPT:
            raise CorruptCaptureError(message)
        if answer.status in (401, 403):
            raise HandOffError(f"the gateway at {self._url} refuses the key: send that of its --hand-off-key-file")
        raise HandOffError(f"{path} of the gateway at {self._url} answered {answer.status}: {message}")


def _parsed(gateway: str) -> URL:
    try:
        url = URL(gateway)
    except ValueError as error:
        raise ConfigurationError(f"{gateway!r} is no URL: {error}") from error
    if url.scheme not in ("http", "https") or not url.host or url.query or url.user:
        raise ConfigurationError(f"{gateway!r} is not the address of a gateway: write http://HOST:PORT")
    return url


def _path(rollout_id: str, *more: str) -> str:
    return "/".join((wire.ROLLOUTS, validate_rollout_id(rollout_id), *more))


def _error(answer: _Answer) -> Mapping[str, Any]:
    try:
        error = orjson.loads(answer.body)["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return error if isinstance(error, Mapping) else {}


def _message(answer: _Answer) -> str:
    return str(_error(answer).get("message") or f"HTTP {answer.status}")
