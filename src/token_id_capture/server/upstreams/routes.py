"""What an operator asks and changes of the upstreams while the server runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from token_id_capture.errors import ConfigurationError
from token_id_capture.server.defaults import ADMIN
from token_id_capture.server.upstreams.detect import FoundEngine, find_engine
from token_id_capture.server.upstreams.pool import Member, Upstreams
from token_id_capture.server.upstreams.shared import SharedList

UPSTREAMS: Final = f"{ADMIN}/upstreams"
_LONGEST_BODY: Final = 4_096


class UpstreamRoutes:
    """``GET`` lists them; ``POST`` and ``DELETE`` with ``{"url": "http://10.0.0.6:8000"}`` add and remove one.

    One that is added must answer as the others do: with the same model, and read by the same ``engine`` adapter.
    Changes need the operator's key, as who may make them decides where rollouts go.
    """

    def __init__(self, upstreams: Upstreams, shared: SharedList, engine: str, *, may_change: bool) -> None:
        self._upstreams = upstreams
        self._shared = shared
        self._engine = engine
        self._may_change = may_change
        self._turn = asyncio.Lock()

    def route(self) -> Route:
        """Where it answers."""
        return Route(UPSTREAMS, self.answer, methods=["GET", "POST", "DELETE"])

    async def answer(self, request: Request) -> Response:
        """Answer a request."""
        if request.method != "GET":
            if not self._may_change:
                return _refused(403, "upstreams can be changed if the server was started with --operator-key-file")
            try:
                url = await _url(request)
                async with self._turn:
                    await (self._add(url) if request.method == "POST" else self._remove(url))
            except (ConfigurationError, OSError) as error:
                return _refused(400, str(error))
        return _json(200, {"upstreams": [_told(member) for member in self._upstreams.members]})

    async def _add(self, url: str) -> None:
        apart = self._upstreams.apart(url)
        if self._upstreams.member(apart.address) is not None:
            return
        try:
            found = await find_engine(apart)
            self._refuse_other(found, await find_engine(self._upstreams))
        finally:
            await apart.close()
        await self._change(lambda addresses: [*addresses, apart.address])

    async def _remove(self, url: str) -> None:
        address = self._upstreams.apart(url).address
        if self._upstreams.member(address) is None:
            raise ConfigurationError(f"{address} is not an upstream of this server")
        await self._change(lambda addresses: [one for one in addresses if one != address])

    async def _change(self, change: Callable[[list[str]], list[str]]) -> None:
        """Change the list of all processes, and follow it here at once."""

        def changed() -> list[str]:
            with self._shared.held():
                newer = self._shared.changed()
                addresses = [one.address for one in self._upstreams.members] if newer is None else newer
                wanted = list(dict.fromkeys(change(addresses)))
                if not wanted:
                    raise ConfigurationError("the last upstream cannot be removed: add another one first")
                self._shared.write(wanted)
                return wanted

        await self._upstreams.follow(await asyncio.to_thread(changed))

    def _refuse_other(self, new: FoundEngine, known: FoundEngine) -> None:
        if not new.reached:
            raise ConfigurationError(f"it was not added because it does not answer: {new.problem}")
        if self._engine != "auto" and new.engine not in (None, self._engine) and known.engine != new.engine:
            raise ConfigurationError(f"it was not added: it is {new.engine}, and this server reads {self._engine}")
        if known.reached and None not in (new.model, known.model) and new.model != known.model:
            raise ConfigurationError(f"it was not added: it serves {new.model!r}, and the others {known.model!r}")


async def _url(request: Request) -> str:
    raw = b""
    async for piece in request.stream():
        raw += piece
        if len(raw) > _LONGEST_BODY:
            raise ConfigurationError("the body is too long")
    try:
        url = orjson.loads(raw)["url"]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigurationError('send a JSON object, as in {"url": "http://10.0.0.6:8000"}') from error
    if not isinstance(url, str):
        raise ConfigurationError("url must be a text")
    return url


def _told(member: Member) -> dict[str, object]:
    """What is said of one: ``running`` are the calls of the worker that answers."""
    return {
        "url": member.address,
        "up": not member.problem,
        "problem": member.problem or None,
        "running": member.running,
    }


def _refused(status: int, problem: str) -> Response:
    return _json(status, {"error": {"message": problem, "type": "invalid_request_error", "code": "invalid"}})


def _json(status: int, body: object) -> Response:
    return Response(orjson.dumps(body), status, {"cache-control": "no-store"}, media_type="application/json")
