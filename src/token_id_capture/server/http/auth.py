"""Who may call the gateway: with a key, only callers that send it; without one, no page in a browser.

The key is taken off before anything else sees the request, so it is neither forwarded nor stored.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from ipaddress import ip_address
from urllib.parse import unquote_to_bytes, urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from token_id_capture.server.http.errors import send_error
from token_id_capture.server.http.metrics import GatewayMetrics


class ApiKeyMiddleware:
    """Answers 401 unless the key is sent as ``Authorization: Bearer KEY``, in ``x-api-key`` or ``x-goog-api-key``,
    or as ``key`` of the query.

    ``open_paths`` need no key; the application must answer them itself. A websocket handshake
    that a server made a scope of its own is let through, as the gateway refuses all of them.
    """

    def __init__(self, app: ASGIApp, key: str, metrics: GatewayMetrics, *, open_paths: Iterable[str] = ()) -> None:
        self._app = app
        self._key = key.encode()
        self._metrics = metrics
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] in self._open_paths:
            # Who has no key is not to hold a connection.
            await self._app(scope, receive, partial(_send_closing, send))
            return
        if not self._is_sent(scope["headers"], scope["query_string"]):
            self._metrics.unauthorized.inc()
            message = (
                "The gateway's API key is missing or wrong: send it as Authorization: Bearer, as x-api-key or as "
                "x-goog-api-key."
            )
            headers = {"www-authenticate": "Bearer"}
            await send_error(scope, receive, partial(_send_closing, send), 401, message, "invalid_api_key", **headers)
            return
        # A header of any name that repeats the key would carry it to the engine.
        kept = [(name, value) for name, value in scope["headers"] if not self._is_key(value, _bearer(value))]
        query = b"&".join(part for part in scope["query_string"].split(b"&") if not self._is_key(_query_key(part)))
        await self._app(dict(scope, headers=kept, query_string=query), receive, send)

    def _is_sent(self, headers: Iterable[tuple[bytes, bytes]], query: bytes) -> bool:
        named = [(name.lower(), value) for name, value in headers]
        bearers = [_bearer(value) for name, value in named if name == b"authorization"]
        keys = [value for name, value in named if name in (b"x-api-key", b"x-goog-api-key")]
        return self._is_key(*bearers, *keys, *map(_query_key, query.split(b"&")))

    def _is_key(self, *candidates: bytes) -> bool:
        # All are compared, so that the time says nothing of which one it was.
        return sum(hmac.compare_digest(candidate.strip(), self._key) for candidate in candidates) > 0


def _bearer(value: bytes) -> bytes:
    """The token of a value ``Bearer TOKEN``; empty for any other."""
    scheme, _, token = value.strip().partition(b" ")
    return token if scheme.lower() == b"bearer" else b""


def _query_key(part: bytes) -> bytes:
    """The value of the part ``key=VALUE`` of a query; empty for any other."""
    name, _, value = part.partition(b"=")
    return unquote_to_bytes(value) if name == b"key" else b""


async def _send_closing(send: Send, message: Message) -> None:
    """Pass a response on, and have the connection closed after it."""
    if message["type"] == "http.response.start":
        message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
    await send(message)


@dataclass(frozen=True)
class KeyedApp:
    """An application and the key that opens it."""

    app: ASGIApp
    key: str


class KeyedPathsMiddleware:
    """Serves what is below some paths apart, behind keys of their own, and ``app`` everywhere else.

    It stands before the check of the agents' key, which opens nothing there. A path whose application is None is still
    not the engine's: a key that is sent there must not reach an engine.
    """

    def __init__(self, app: ASGIApp, keyed: Mapping[str, ASGIApp | None]) -> None:
        self._app = app
        self._keyed = {f"{path}/": one or _switched_off for path, one in keyed.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] in ("http", "websocket"):
            for path, keyed in self._keyed.items():
                if f"{scope['path']}/".startswith(path):
                    app = keyed
        await app(scope, receive, send)


async def _switched_off(scope: Scope, receive: Receive, send: Send) -> None:
    message = "This gateway has no hand-off: it was started without --hand-off-key-file."
    await send_error(scope, receive, send, 404, message, "no_hand_off")


class NoBrowserMiddleware:
    """For a gateway without a key: answers 403 to what a page in somebody's browser sends.

    A page of any site can have a browser call loopback addresses. Its origin says so; or, after its own name
    was made to resolve to 127.0.0.1 (DNS rebinding), the host does. So an ``Origin`` must be of this machine, and on
    loopback the ``Host`` must be an address, a name without a dot, one under ``.localhost`` or ``.internal``, which
    nobody can register, or one of ``allowed_hosts``. ``open_paths`` tell nothing, and are open to all.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: Iterable[str] = (), *, open_paths: Iterable[str] = ()) -> None:
        self._app = app
        self._allowed = frozenset(name.lower() for name in allowed_hosts)
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] in ("http", "websocket") and scope["path"] not in self._open_paths
        problem = self._problem(scope) if guarded else None
        if problem is None:
            await self._app(scope, receive, send)
            return
        message = f"{problem}. The gateway has no API key, so it serves no web pages; see TOKCAP_ALLOWED_HOSTS."
        await send_error(scope, receive, send, 403, message, "forbidden_origin")

    def _problem(self, scope: Scope) -> str | None:
        local = _is_loopback((scope.get("server") or ("", None))[0])
        for name, value in scope["headers"]:
            text = value.decode("latin-1")
            if name.lower() == b"origin" and not self._is_local_origin(text):
                return "Requests of web pages from elsewhere are refused"
            if name.lower() == b"host" and local and not self._is_unforgeable(_host_of(f"//{text}")):
                return f"The host {text!r} is not one of this machine"
        return None

    def _is_local_origin(self, origin: str) -> bool:
        host = _host_of(origin)
        return _is_loopback(host) or host == "localhost" or host.endswith(".localhost") or host in self._allowed

    def _is_unforgeable(self, host: str) -> bool:
        return (
            host in self._allowed or "." not in host or _is_address(host) or host.endswith((".localhost", ".internal"))
        )


def _host_of(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").removesuffix(".")
    except ValueError:
        return "."


@lru_cache(maxsize=256)
def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


@lru_cache(maxsize=256)
def _is_loopback(host: str) -> bool:
    return _is_address(host) and ip_address(host).is_loopback
