"""The live page as an ASGI application."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from token_id_capture.errors import CorruptCaptureError, TokenCaptureError, UnknownRolloutError
from token_id_capture.lifecycle import Outcome, State
from token_id_capture.records import is_rollout_id
from token_id_capture.report.model import PageData, Problem, Vocabulary
from token_id_capture.report.page import as_json, policy, render
from token_id_capture.report.records import Told
from token_id_capture.store.read.newest import Wanted
from token_id_capture.view.access import KeyRequired
from token_id_capture.view.follow import Follower
from token_id_capture.view.reads import Reads

COMMAND: Final = "tokcap view"
_HEADERS: Final = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
_STATUS: Final[dict[type[Exception], int]] = {
    UnknownRolloutError: 404,
    CorruptCaptureError: 500,
    TimeoutError: 503,
    ValueError: 400,
    TokenCaptureError: 503,
}


def make_app(
    path: Path,
    key: str,
    *,
    told: Mapping[str, Told] | None = None,
    vocabulary: Vocabulary | None = None,
    loopback: bool = True,
) -> ASGIApp:
    """The application that shows this database to anyone with the key. It never writes."""
    site = Site(path, told or {}, vocabulary)
    app = Starlette(
        routes=[
            Route("/", site.page),
            Route("/api/rollouts", site.rollouts),
            Route("/api/rollouts/{rollout_id}", site.rollout),
            Route("/api/overview", site.overview),
            Route("/api/events", site.events),
        ],
        exception_handlers=dict.fromkeys(_STATUS, _refused),
        lifespan=site.lifespan,
    )
    return KeyRequired(app, key, COMMAND, loopback=loopback)


class Site:
    """One database, with what answers for it."""

    def __init__(self, path: Path, told: Mapping[str, Told], vocabulary: Vocabulary | None) -> None:
        self._follower = Follower(path, told)
        self._reads = Reads(path, told, vocabulary, self._follower.changes_of)
        self._html = render(f"{path.name}: {COMMAND}", PageData(path.name, live=True), connects=True)

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Close what was opened when the server ends."""
        yield
        await self._follower.close()
        self._reads.close()

    async def page(self, request: Request) -> Response:
        """The page itself, the same for all."""
        policies = {"content-security-policy": f"{policy(connects=True)}; frame-ancestors 'none'"}
        return Response(self._html, media_type="text/html", headers={**_HEADERS, **policies})

    async def rollouts(self, request: Request) -> Response:
        """Lines of the list; the fields of ``Wanted`` narrow it, and ``before`` continues the list."""
        asked = {name: value for name, value in request.query_params.items() if value}
        wanted = Wanted(
            text=asked.get("text"),
            state=State(asked["state"]) if "state" in asked else None,
            outcome=Outcome(asked["outcome"]) if "outcome" in asked else None,
            reason=asked.get("reason"),
            cause=asked.get("cause"),
        )
        before = int(asked["before"]) if "before" in asked else None
        return _json(await self._reads.lines(wanted, before))

    async def rollout(self, request: Request) -> Response:
        """One rollout as ``report`` shows it."""
        rollout_id = request.path_params["rollout_id"]
        if not is_rollout_id(rollout_id):
            raise UnknownRolloutError("this is not the id of a rollout")
        return _json(await self._reads.rollout(rollout_id))

    async def overview(self, request: Request) -> Response:
        """All rollouts together."""
        return _json(await self._reads.overview())

    async def events(self, request: Request) -> Response:
        """What changes from now on, as server-sent events."""

        async def told() -> AsyncIterator[bytes]:
            async with self._follower.watching() as watcher:
                async for event in watcher.events():
                    yield event

        return StreamingResponse(told(), media_type="text/event-stream", headers=_HEADERS)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json", headers=_HEADERS)


async def _refused(request: Request, error: Exception) -> Response:
    status = next(status for kind, status in _STATUS.items() if isinstance(error, kind))
    return Response(as_json(Problem(str(error))), status, media_type="application/json", headers=_HEADERS)
