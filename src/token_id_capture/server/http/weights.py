"""The weight version of calls whose engine is silent about it: a trainer stamps it, for all or call by call.

What the engine says itself always wins. A call during which the stamp changed gets none, because nobody
knows which of its tokens came from which weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final, Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response

from token_id_capture.protocols import TokenSink, offers
from token_id_capture.server.defaults import ADMIN

WEIGHT_VERSION: Final = f"{ADMIN}/weight-version"
HEADER: Final = "x-tokcap-weight-version"
LONGEST: Final = 200

_LONGEST_BODY: Final = 4_096


class Stamp(Protocol):
    """What is stamped, for every process that captures to one place."""

    def read(self) -> str | None:
        """What is stamped now; takes microseconds."""
        ...

    def write(self, version: str | None) -> None:
        """Stamp what is captured from now on; None stops it. Blocks.

        Raises:
            OSError: it cannot be stored.
        """
        ...


class _OwnStamp:
    """The stamp of one process."""

    def __init__(self) -> None:
        self._version: str | None = None

    def read(self) -> str | None:
        return self._version

    def write(self, version: str | None) -> None:
        self._version = version


class StampedWeights(Protocol):
    """A sink whose processes share the stamp; the store does."""

    @property
    def weights(self) -> Stamp:
        """The stamp of all processes."""
        ...


class WeightVersions:
    """The stamp of this gateway: the sink's, or its own if the sink has none."""

    def __init__(self, sink: TokenSink | None) -> None:
        self._stamp: Stamp = sink.weights if offers(sink, StampedWeights) else _OwnStamp()

    def of_call(self, headers: Mapping[str, str]) -> Callable[[], str | None]:
        """The stamp of a call with these headers that begins now, to be asked when it has ended."""
        told = headers.get(HEADER, "").strip()[:LONGEST]
        if told:
            return lambda: told
        read = self._stamp.read
        before = read()
        return lambda: before if read() == before else None

    async def answer(self, request: Request) -> Response:
        """``GET`` tells the stamp; ``POST`` with ``{"version": "step-12"}`` changes it, and null takes it back."""
        if request.method == "POST":
            problem = await self._changed(request)
            if problem is not None:
                return _json(400, {"error": {"message": problem, "type": "invalid_request_error", "code": "invalid"}})
        return _json(200, {"version": self._stamp.read()})

    async def _changed(self, request: Request) -> str | None:
        raw = b""
        async for piece in request.stream():
            raw += piece
            if len(raw) > _LONGEST_BODY:
                return "the body is too long"
        try:
            version = orjson.loads(raw)["version"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return 'send a JSON object with the version, as in {"version": "step-12"}'
        version = str(version) if type(version) is int else version
        if version is not None and not (isinstance(version, str) and 0 < len(version) <= LONGEST):
            return f"version must be a text of at most {LONGEST} characters, a whole number or null"
        try:
            await asyncio.to_thread(self._stamp.write, version)
        except OSError as error:
            return f"it cannot be stored: {error.strerror}"
        return None


def _json(status: int, body: object) -> Response:
    return Response(orjson.dumps(body), status, {"cache-control": "no-store"}, media_type="application/json")
