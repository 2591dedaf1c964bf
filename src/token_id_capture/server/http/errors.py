"""Responses that the server makes itself, in the shape that the client of each dialect shows to its users."""

from __future__ import annotations

import orjson
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from token_id_capture.server.dialects.errors import error_envelope
from token_id_capture.server.dialects.paths import dialect_of


async def send_error(
    scope: Scope, receive: Receive, send: Send, status: int, message: str, code: str, **headers: str
) -> None:
    """Answer in the envelope of the dialect that the path is of; else in that of OpenAI's chat."""
    dialect = dialect_of(scope["path"]) if scope["type"] == "http" else None
    body = orjson.dumps(error_envelope(dialect, status, message, code))
    response = Response(body, status, headers, media_type="application/json")
    await response(scope, receive, send)


def wants_websocket(scope: Scope) -> bool:
    """Whether this is a websocket handshake, also where the server cannot speak the protocol."""
    return scope["type"] == "websocket" or any(
        name.lower() == b"upgrade" and value.lower() == b"websocket" for name, value in scope["headers"]
    )


async def refuse_websocket(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a handshake with 426, on which clients fall back to HTTP at once.

    A server that cannot send a status in answer to a handshake gets a close instead, which it
    turns into a 403.
    """
    if scope["type"] == "websocket" and "websocket.http.response" not in scope.get("extensions", {}):
        await receive()
        closing: Message = {"type": "websocket.close", "code": 1000}
        await send(closing)
        return
    message = "Calls over a websocket are not captured; use HTTP."
    await send_error(scope, receive, send, 426, message, "upgrade_required", upgrade="HTTP/1.1", connection="upgrade")
