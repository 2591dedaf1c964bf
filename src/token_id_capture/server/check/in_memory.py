"""A client and a sink without sockets and files, to see what a gateway makes of one call.

The start-up check and the test kit for engines run the real gateway between these two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Scope

from token_id_capture.records import TokenEntry
from token_id_capture.server.http.upstream import RawHeaders
from token_id_capture.server.middleware import CAPTURE_SEGMENT, ROLLOUT_PREFIX


@dataclass
class MemorySink:
    """Keeps what it is given. A mark is its reason, followed by ``": "`` and particulars."""

    entries: list[TokenEntry] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    open_calls: set[str] = field(default_factory=set)

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """Remember the call as open."""
        self.open_calls.add(model_call_id)

    async def refuse_call(self, rollout_id: str, model_call_id: str, detail: str = "") -> None:
        """Close the call without an entry."""
        self.open_calls.discard(model_call_id)
        self.refusals.append(detail)

    async def put(self, entry: TokenEntry) -> None:
        """Keep the entry; the one under the call's own id closes it."""
        self.entries.append(entry)
        self.open_calls.discard(entry.model_call_id)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "", reason: str = "") -> None:
        """Keep the reason."""
        self.marks.append(reason)

    async def close(self) -> None:
        """Nothing to release."""


@dataclass(frozen=True)
class MemoryResponse:
    """What the client got; ``whole`` is false where the connection would have broken."""

    status: int
    headers: RawHeaders
    body: bytes
    whole: bool


async def call_in_memory(
    app: ASGIApp, method: str, path: str, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()
) -> MemoryResponse:
    """Make one captured call to an application, as a client that stays until the end."""
    target = f"{ROLLOUT_PREFIX}/in-memory{CAPTURE_SEGMENT}{path}"
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": target,
        "raw_path": target.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), *headers],
        "client": None,
        "server": None,
    }
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        if waiting:
            return waiting.pop()
        await asyncio.Event().wait()  # this client never hangs up
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    start, *pieces = sent
    return MemoryResponse(
        start["status"],
        list(start["headers"]),
        b"".join(piece.get("body", b"") for piece in pieces),
        whole=bool(pieces) and not pieces[-1].get("more_body", False),
    )
