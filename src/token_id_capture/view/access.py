"""Access to the page: with the address that the command printed, or the operator's key.

The database is for its owner alone, and a port of loopback is for every user of the machine. So the address
has a key in it, as Jupyter's does; a browser keeps it in a cookie from then on.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

KEY_PARAMETER: Final = "key"
_LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")


class KeyRequired:
    """Lets through who has the key, in the address, in the cookie or as a bearer token.

    ``command`` is named in refusals. On ``loopback`` the request must also name this machine: a page of another
    site can make a browser send requests there under a name of its own (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, key: str, command: str, *, loopback: bool = True) -> None:
        self._app = app
        self._key = key.encode()
        self._command = command
        self._loopback = loopback
        # Browsers send the cookies of one port of a host to all, so each server has a name of its own.
        self._cookie = f"{command.replace(' ', '-')}-{hashlib.sha256(self._key).hexdigest()[:8]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(HTTPConnection(scope)) if scope["type"] in ("http", "websocket") else None
        await (self._app if refusal is None else refusal)(scope, receive, send)

    def _refusal(self, request: HTTPConnection) -> Response | None:
        if self._loopback and not _is_loopback(request.headers.get("host", "")):
            return PlainTextResponse(f"{self._command} answers to 127.0.0.1 and localhost\n", 421)
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        kept = request.cookies.get(self._cookie, "")
        if self._is_key(kept) or (scheme.lower() == "bearer" and self._is_key(token.strip())):
            return None
        if not self._is_key(request.query_params.get(KEY_PARAMETER, "")):
            return PlainTextResponse(f"Open the address that {self._command} printed: it has the key in it.\n", 403)
        # Without the key in it: addresses stay in histories, and are sent as referrers.
        # With one slash: an address that begins with two names another host.
        response = RedirectResponse(f"/{request.url.path.lstrip('/')}", 303)
        response.set_cookie(self._cookie, self._key.decode(), httponly=True, samesite="strict")
        return response

    def _is_key(self, candidate: str) -> bool:
        return hmac.compare_digest(candidate.encode(), self._key)


def _is_loopback(host: str) -> bool:
    name, _, port = host.rpartition(":")
    return (name in _LOOPBACK and port.isdigit()) or host in _LOOPBACK
