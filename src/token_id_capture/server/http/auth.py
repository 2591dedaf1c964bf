"""Who may call the gateway: with a key, only callers that send it.

The key is taken off before anything else sees the request, so it is neither forwarded nor stored.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from token_id_capture.server.http.errors import send_error
from token_id_capture.server.http.metrics import GatewayMetrics


class ApiKeyMiddleware:
    """Answers 401 unless ``Authorization: Bearer KEY`` or ``x-api-key: KEY`` is sent.

    ``open_paths`` need no key; the application must answer them itself. A websocket handshake
    that a server made a scope of its own is let through, for the gateway refuses all of them.
    """

    def __init__(self, app: ASGIApp, key: str, metrics: GatewayMetrics, *, open_paths: Iterable[str] = ()) -> None:
        self._app = app
        self._key = key.encode()
        self._metrics = metrics
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        if not self._is_sent(scope["headers"]):
            self._metrics.unauthorized.inc()
            message = "The gateway's API key is missing or wrong: send it as Authorization: Bearer, or as x-api-key."
            await send_error(scope, receive, send, 401, message, "invalid_api_key", **{"www-authenticate": "Bearer"})
            return
        # A header of any name that repeats the key would carry it to the engine.
        kept = [(name, value) for name, value in scope["headers"] if not self._is_key(value, _bearer(value))]
        await self._app(dict(scope, headers=kept), receive, send)

    def _is_sent(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        named = [(name.lower(), value) for name, value in headers]
        bearers = [_bearer(value) for name, value in named if name == b"authorization"]
        return self._is_key(*bearers, *(value for name, value in named if name == b"x-api-key"))

    def _is_key(self, *candidates: bytes) -> bool:
        # All are compared, so that the time says nothing of which one it was.
        return sum(hmac.compare_digest(candidate.strip(), self._key) for candidate in candidates) > 0


def _bearer(value: bytes) -> bytes:
    """The token of a value ``Bearer TOKEN``; empty for any other."""
    scheme, _, token = value.strip().partition(b" ")
    return token if scheme.lower() == b"bearer" else b""
