"""Pure ASGI middleware that ties each HTTP call to its rollout.

A harness is given ``<server>/ng-rollout/<id>/training-token-capture`` as its base URL, and puts
whatever it calls behind it. The prefix is taken off before routing, so the application sees the
paths that it knows. Pure ASGI, because Starlette's BaseHTTPMiddleware runs the application in
another task, in which neither the context nor a cancellation arrives as it should.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple
from uuid import uuid4

from starlette.types import ASGIApp, Receive, Scope, Send

from token_id_capture.capture.context import CaptureContext, reset_token_sink, set_token_sink
from token_id_capture.capture.recorder import SCOPE_KEY, CallRecorder
from token_id_capture.protocols import TokenSink, installed_token_sink, mark_of
from token_id_capture.records import validate_agent, validate_rollout_id
from token_id_capture.server.http.errors import refuse_websocket, send_error, wants_websocket
from token_id_capture.server.wire.origin import StartedSessions, call_origin, header_texts

ROLLOUT_PREFIX: Final = "/ng-rollout"
CAPTURE_SEGMENT: Final = "/training-token-capture"
AGENT_SEGMENT: Final = "/agent"
"""Before the capture segment, followed by a name: for agents of a harness that tells them apart in no header."""


class TokenCaptureMiddleware:
    """Binds requests under the correlation prefix to a rollout, a call and a sink.

    ==========================================================  =======================================
    ``/ng-rollout/<id>/training-token-capture/x``               the application sees ``/x``, with a capture context
    ``/ng-rollout/<id>/agent/<name>/training-token-capture/x``  the same, and the call is of the agent ``name``
    ``/ng-rollout/<id>/x``                                      the application sees ``/x``; nothing is captured
    any other path                                              untouched
    ==========================================================  =======================================

    A malformed rollout id or agent name is answered with 400: a rewritten id could not be looked up. Each request
    is a call of its own, also where a harness repeats one. ``sink`` is the one to record in, else
    the one of ``install_token_sink``; with neither, capture is off and only the prefix is removed.
    """

    def __init__(self, app: ASGIApp, *, sink: TokenSink | None = None) -> None:
        if sink is not None:
            mark_of(sink)
        self._app = app
        self._sink = sink
        self._started = StartedSessions()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        try:
            tag = _read_tag(scope)
        except ValueError as error:
            await send_error(scope, receive, send, 400, str(error), "invalid_rollout_id")
            return
        context = None
        if tag is not None:
            scope = dict(scope, path=tag.path, raw_path=tag.raw_path)
            sink = self._sink if self._sink is not None else installed_token_sink()
            if tag.captured and sink is not None:
                origin = call_origin(header_texts(scope["headers"]), tag.agent, self._started)
                context = CaptureContext(tag.rollout_id, uuid4().hex, sink, origin=origin)
                scope[SCOPE_KEY] = CallRecorder(context)
        if context is not None and wants_websocket(scope):
            # What a websocket carries would bypass the capture, and nobody would notice.
            await refuse_websocket(scope, receive, send)
            return
        # Also set where there is none: on a connection that is kept alive, asyncio hands the context of
        # an earlier request on to later ones (https://github.com/python/cpython/issues/140947).
        token = set_token_sink(context)
        try:
            await self._app(scope, receive, send)
        finally:
            reset_token_sink(token)


@dataclass(frozen=True)
class _Tag:
    """The correlation prefix of a path, and the path without it."""

    rollout_id: str
    captured: bool
    agent: str | None
    path: str
    raw_path: bytes


def _read_tag(scope: Scope) -> _Tag | None:
    root = scope.get("root_path", "")
    path: str = scope["path"]
    mounted = bool(root) and path.startswith(root)
    tail = path[len(root) :] if mounted else path
    raw = _raw_tail(scope, root if mounted else "", tail)
    if not _is_tagged(tail):
        if _is_tagged(raw):
            raise ValueError("the path names a rollout in one spelling and none in the other")
        return None
    prefix = _split(tail)
    if raw != tail and (not raw.startswith(prefix.text) or _split(raw) != prefix):
        raise ValueError("the rollout part of the path must not be percent-encoded")
    start = root if mounted else ""
    rest, raw_rest = (text[len(prefix.text) :] or "/" for text in (tail, raw))
    return _Tag(prefix.rollout_id, prefix.captured, prefix.agent, start + rest, (start + raw_rest).encode("latin-1"))


def _raw_tail(scope: Scope, root: str, tail: str) -> str:
    raw: bytes | None = scope.get("raw_path")
    if raw is None:
        return tail
    return raw.decode("latin-1").removeprefix(root)


def _is_tagged(path: str) -> bool:
    return path == ROLLOUT_PREFIX or path.startswith(ROLLOUT_PREFIX + "/")


class _Prefix(NamedTuple):
    text: str
    rollout_id: str
    captured: bool = False
    agent: str | None = None


def _split(path: str) -> _Prefix:
    """The prefix of a tagged path."""
    rollout_id, _, rest = path[len(ROLLOUT_PREFIX) + 1 :].partition("/")
    validate_rollout_id(rollout_id)
    prefix = f"{ROLLOUT_PREFIX}/{rollout_id}"
    rest = f"/{rest}"
    if _begins(rest, CAPTURE_SEGMENT):
        return _Prefix(prefix + CAPTURE_SEGMENT, rollout_id, captured=True)
    if _begins(rest, AGENT_SEGMENT):
        agent, _, behind = rest[len(AGENT_SEGMENT) + 1 :].partition("/")
        if _begins(f"/{behind}", CAPTURE_SEGMENT):
            text = f"{prefix}{AGENT_SEGMENT}/{validate_agent(agent)}{CAPTURE_SEGMENT}"
            return _Prefix(text, rollout_id, captured=True, agent=agent)
    return _Prefix(prefix, rollout_id)


def _begins(path: str, segment: str) -> bool:
    return path == segment or path.startswith(segment + "/")
