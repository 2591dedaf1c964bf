"""The calls that the gateway serves at one time: how many, at most how many, and a line for each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from token_id_capture.capture.recorder import recorder_in
from token_id_capture.server.http.client import RefusedRequestError
from token_id_capture.server.http.errors import send_error
from token_id_capture.server.http.metrics import GatewayMetrics
from token_id_capture.server.wire.endpoints import Kind, kind_of

RETRY_AFTER_SECONDS: Final = 5

access_logger = logging.getLogger("token_id_capture.access")
"""Logs each request at level INFO as it ends, without its query; who wants that sets the level."""


class CallsInFlight:
    """Counts requests that could generate, and answers 503 where ``limit`` of them are in flight.

    It stands before the gateway, so a call too many is neither read, registered nor sent. A limit
    of 0 is none. A call whose client hung up counts until the engine's response is drained.
    """

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, *, limit: int = 0) -> None:
        self._app = app
        self._metrics = metrics
        self._limit = limit
        self._calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        response = _WatchedResponse(send, self._metrics)
        begun = perf_counter()
        try:
            if kind_of(scope["method"], scope["path"]) is Kind.HARMLESS:
                await self._app(scope, receive, response.send)
            elif self._limit and self._calls >= self._limit:
                await self._refuse(scope, receive, response.send)
            else:
                await self._serve(scope, receive, response.send)
        finally:
            response.end()
            if access_logger.isEnabledFor(logging.INFO):
                _log_access(scope, response.status, perf_counter() - begun)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._calls += 1
        self._metrics.calls_in_flight.inc()
        try:
            await self._app(scope, receive, send)
        finally:
            self._calls -= 1
            self._metrics.calls_in_flight.dec()

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        if recorder_in(scope) is not None:
            self._metrics.count("overloaded")
        message = (
            f"The call was not sent: this worker of the gateway already serves {self._limit} calls at once. "
            "Try again soon."
        )
        wait = {"retry-after": str(RETRY_AFTER_SECONDS)}
        await send_error(scope, receive, send, 503, message, "too_many_calls", **wait)


class AccessLogged:
    """Logs each request of an application that does not stand behind ``CallsInFlight``."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = _WatchedResponse(send, self._metrics)
        begun = perf_counter()
        try:
            await self._app(scope, receive, response.send)
        finally:
            response.end()
            if access_logger.isEnabledFor(logging.INFO):
                _log_access(scope, response.status, perf_counter() - begun)


class BodyBudget:
    """The bytes of request bodies that are held at one time, of all calls that have not ended."""

    def __init__(self, most: int) -> None:
        """``most`` is in bytes."""
        self._most = most
        self.held = 0

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """A function that takes so many bytes of the budget until the block ends.

        It raises ``RefusedRequestError`` (503) where they are not there.
        """
        taken = 0

        def take(count: int) -> None:
            nonlocal taken
            if self.held + count > self._most:
                message = "The call was not sent: the gateway holds too many bytes of other calls. Try again soon."
                raise RefusedRequestError(503, "too_many_bytes", message)
            self.held += count
            taken += count

        try:
            yield take
        finally:
            self.held -= taken


class _WatchedResponse:
    """Passes a response on, and knows its status and whether it is a stream in flight."""

    def __init__(self, send: Send, metrics: GatewayMetrics) -> None:
        self.status: int | None = None
        self._send = send
        self._metrics = metrics
        self._streams = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if _is_event_stream(message):
                self._streams = True
                self._metrics.streams_in_flight.inc()
        await self._send(message)

    def end(self) -> None:
        if self._streams:
            self._metrics.streams_in_flight.dec()


def _log_access(scope: Scope, status: int | None, seconds: float) -> None:
    method, path = scope["method"], scope["path"]
    fields = {"method": method, "path": path, "status": status, "seconds": round(seconds, 6)}
    shown = "no response" if status is None else status
    access_logger.info("%s %s: %s, %.3f s", method, path, shown, seconds, extra={"fields": fields})


def _is_event_stream(message: Message) -> bool:
    types = [value for name, value in message.get("headers", ()) if name.lower() == b"content-type"]
    return any(value.lower().startswith(b"text/event-stream") for value in types)
