"""A reverse proxy in front of an OpenAI-compatible engine that captures what rollouts generate.

What belongs to no captured rollout passes through untouched. See the folder's README for the flow.
"""

from __future__ import annotations

import logging

from starlette.types import Receive, Scope, Send

from token_id_capture import reasons
from token_id_capture.errors import RolloutFrozenError, RolloutRetiredError
from token_id_capture.server.call import CapturedCall, CaptureOptions
from token_id_capture.server.engines.base import Engine
from token_id_capture.server.http.client import (
    BodyTooLargeError,
    Client,
    ClientGoneError,
    ClientStalledError,
    HangUpLimit,
)
from token_id_capture.server.http.errors import refuse_websocket, wants_websocket
from token_id_capture.server.http.exchange import Exchanges, Response, redirection
from token_id_capture.server.http.upstream import UpstreamError
from token_id_capture.server.wire.endpoints import Kind, kind_of
from token_id_capture.server.wire.prompt_cache import KnownTexts
from token_id_capture.server.wire.request import CallBody
from token_id_capture.sink import (
    current_capture_context,
    mark_current_call,
    refuse_current_call,
    register_call_intent,
)

_logger = logging.getLogger(__name__)


class Gateway:
    """The ASGI application behind ``TokenCaptureMiddleware``.

    ``body_limit`` is the longest request body in bytes. ``client_timeout`` is how many seconds a client
    may pause within it.
    """

    def __init__(
        self,
        upstream: Exchanges,
        engine: Engine,
        *,
        body_limit: int = 64 * 2**20,
        client_timeout: float = 300.0,
        options: CaptureOptions | None = None,
    ) -> None:
        self._upstream = upstream
        self._engine = engine
        self._body_limit = body_limit
        self._client_timeout = client_timeout
        self._options = options or CaptureOptions()
        self._known = KnownTexts()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if wants_websocket(scope):
            await refuse_websocket(scope, receive, send)
            return
        client = Client(scope, receive, send)
        if not scope["path"].startswith("/") or not (scope.get("raw_path") or b"/").startswith(b"/"):
            # "*", "http://elsewhere/" and "@elsewhere/" would not be below the upstream.
            await client.send_error(400, "The request target must begin with a slash.", "invalid_target")
            return
        try:
            body = await client.read_body(self._body_limit, longest_silence=self._client_timeout)
        except ClientGoneError:
            return
        except BodyTooLargeError:
            message = f"The request body is longer than {self._body_limit} bytes."
            await client.send_error(413, message, "request_too_large")
            return
        except ClientStalledError:
            message = f"Nothing more of the request came for {self._client_timeout:g} s."
            await client.send_error(408, message, "request_timeout")
            return
        context = current_capture_context()
        kind = kind_of(scope["method"], scope["path"], self._engine.paths)
        if context is None or context.token_sink is None or kind is Kind.HARMLESS:
            await self._relay(client, body, None)
        elif kind is Kind.UNCAPTURED:
            if await self._announced(client):
                await self._relay(client, body, _Outcome(f"{scope['method']} {scope['path']}", intent=True))
        else:
            call = await self._captured_call(client, body)
            del body  # a long prompt need not wait for its answer
            if call is not None:
                await call.run()

    async def _captured_call(self, client: Client, raw: bytes) -> CapturedCall | None:
        """The call of a captured endpoint, announced; None if it was answered already."""
        try:
            call = self._prepared(client, raw)
        except Exception as error:
            # A mistake in a engine adapter costs the capture of a call, never the call.
            _logger.exception("the engine's engine adapter failed")
            outcome = _Outcome(f"{type(error).__name__}: {error}", intent=True, reason=reasons.CAPTURE_FAILED)
            if await self._announced(client):
                await self._relay(client, raw, outcome)
            return None
        if call is None:
            # The engine's own error is the answer. Should it be none, the call was not captured.
            await self._relay(client, raw, _Outcome("a body that is no JSON object", intent=False))
        return call if call is not None and await self._announced(client) else None

    def _prepared(self, client: Client, raw: bytes) -> CapturedCall | None:
        """The call as the engine is to be asked; None if the body cannot be read."""
        body = CallBody.parse(self._engine.paths[client.scope["path"]], raw)
        if body is None:
            return None
        body.decide_streaming(self._engine, self._options.streaming)
        sent = body.for_engine(self._engine, raw)
        if sent is None:
            return None
        if (context := current_capture_context()) is not None:
            context.model = body.model
        return CapturedCall(
            client,
            body,
            sent,
            engine=self._engine,
            upstream=self._upstream,
            options=self._options,
            known=self._known,
        )

    async def _announced(self, client: Client) -> bool:
        """Register the intent; if that fails the call is not dispatched, and the client is told."""
        try:
            await register_call_intent()
        except (RolloutFrozenError, RolloutRetiredError) as error:
            # 410, for clients repeat a 409 and a 5xx, and this rollout takes no call any more.
            await client.send_error(410, str(error), "rollout_closed")
        except Exception as error:
            _logger.exception("registering a call failed")
            await client.send_error(503, f"The call was not sent: {error}", "capture_unavailable")
        else:
            return True
        return False

    async def _relay(self, client: Client, body: bytes, outcome: _Outcome | None) -> None:
        """Pass a request and its response on as they are; ``outcome`` records what became of it."""

        async def relay(limit: HangUpLimit) -> None:
            async with self._upstream.open(client.scope, body, plain=False) as response:
                if outcome is not None:
                    await outcome.replied(response)
                await client.start(response.status, response.headers)
                while chunk := await response.next_chunk():
                    await client.write(chunk)
                limit.lift()
                await client.finish()

        try:
            await client.limit_after_hang_up(0.0, relay)
        except ClientGoneError:
            if outcome is not None:
                await outcome.failed("the client hung up", sent=True)
        except UpstreamError as error:
            if outcome is not None:
                await outcome.failed(str(error), sent=error.sent)
            if not client.started:
                await client.send_error(error.status, str(error), "upstream_unavailable")


class _Outcome:
    """Records the outcome of a call that could generate and is not captured, once, and before its response ends.

    ``intent`` says whether an intent is open, ``reason`` why nothing is captured where there is an answer.
    """

    def __init__(self, what: str, *, intent: bool, reason: str = reasons.UNCAPTURED_ENDPOINT) -> None:
        self._what = what
        self._intent = intent
        self._reason = reason
        self._settled = False

    async def replied(self, response: Response) -> None:
        """The engine answered with this response, of which the head is known."""
        self._settled = True
        status, elsewhere = response.status, redirection(response)
        if elsewhere is not None:
            await mark_current_call(reasons.UNCAPTURED_ENDPOINT, f"{self._what}: HTTP {status} to {elsewhere}")
        elif status < 200 or 300 <= status < 500:
            if self._intent:
                await refuse_current_call(f"HTTP {status}")
        elif status < 300:
            await mark_current_call(self._reason, self._what)
        else:
            await mark_current_call(reasons.UNKNOWN_OUTCOME, f"{self._what}: HTTP {status}")

    async def failed(self, problem: str, *, sent: bool) -> None:
        """There is no answer, or it broke off."""
        if self._settled:
            return
        if sent:
            await mark_current_call(reasons.UNKNOWN_OUTCOME, f"{self._what}: {problem}")
        elif self._intent:
            await refuse_current_call(problem)
