"""A reverse proxy in front of an OpenAI-compatible engine that captures what rollouts generate.

What belongs to no captured rollout passes through untouched. See the folder's README for the flow.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from starlette.types import Receive, Scope, Send

from token_id_capture import reasons
from token_id_capture.capture.recorder import CallRecorder, recorder_in
from token_id_capture.errors import RolloutFrozenError, RolloutRetiredError
from token_id_capture.lifecycle import CallOrigin
from token_id_capture.server.call import CapturedCall
from token_id_capture.server.continuity.continuer import Continuer
from token_id_capture.server.continuity.plan import Plan
from token_id_capture.server.engines.base import Engine
from token_id_capture.server.http.client import Client, ClientGoneError, HangUpLimit, RefusedRequestError
from token_id_capture.server.http.errors import refuse_websocket, wants_websocket
from token_id_capture.server.http.exchange import Exchanges, Response, is_refusal, redirection
from token_id_capture.server.http.limits import RETRY_AFTER_SECONDS, BodyBudget
from token_id_capture.server.http.upstream import UpstreamError
from token_id_capture.server.http.weights import WeightVersions
from token_id_capture.server.settings import GatewaySettings
from token_id_capture.server.wire.endpoints import Kind, kind_of
from token_id_capture.server.wire.origin import header_texts, session_headers
from token_id_capture.server.wire.prompt_cache import KnownTexts
from token_id_capture.server.wire.request import CallBody

_logger = logging.getLogger(__name__)


class Gateway:
    """The ASGI application behind ``TokenCaptureMiddleware``.

    ``budget`` bounds the request bodies that are held, ``continuer`` decides on the prompts of chats.
    ``weights`` knows what a trainer stamps. ``count_refusal`` is called with the error code of each
    request that is refused for its body, ``count_untagged`` for each call that could generate and is of no
    captured rollout; without it nobody means to capture, and nothing is said.
    """

    def __init__(
        self,
        upstream: Exchanges,
        engine: Engine,
        settings: GatewaySettings | None = None,
        *,
        budget: BodyBudget | None = None,
        continuer: Continuer | None = None,
        count_refusal: Callable[[str], None] = lambda code: None,
        count_untagged: Callable[[], None] | None = None,
        weights: WeightVersions | None = None,
    ) -> None:
        self._weights = weights or WeightVersions(None)
        self._count_untagged = count_untagged
        self._told_untagged = False
        self._upstream = upstream
        self._engine = engine
        self._settings = settings or GatewaySettings()
        self._continuer = continuer
        self._count_refusal = count_refusal
        self._budget = budget or BodyBudget(self._settings.body_bytes_in_flight)
        self._known = KnownTexts() if continuer is None else continuer.prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if wants_websocket(scope):
            await refuse_websocket(scope, receive, send)
            return
        client = Client(scope, receive, send)
        if problem := _problem(scope):
            await client.send_error(400, problem, "invalid_request", connection="close")
            return
        try:
            with self._budget.share() as take:
                body = await client.read_body(
                    self._settings.body_limit, longest_silence=self._settings.client_timeout, take=take
                )
                await self._serve(client, body, take)
        except ClientGoneError:
            return
        except RefusedRequestError as refused:
            self._count_refusal(refused.code)
            _logger.warning("a request was refused: %s", refused)
            wait = {"retry-after": str(RETRY_AFTER_SECONDS)} if refused.status == 503 else {}
            await client.send_error(refused.status, str(refused), refused.code, **wait)

    async def _serve(self, client: Client, body: bytes, take: Callable[[int], None]) -> None:
        scope = client.scope
        recorder = recorder_in(scope)
        kind = kind_of(scope["method"], scope["path"], self._engine.paths)
        if recorder is None and kind is not Kind.HARMLESS:
            self._untagged(scope)
        if recorder is None or kind is Kind.HARMLESS:
            await self._relay(client, body, None)
        elif kind is Kind.UNCAPTURED:
            if await self._begun(client, recorder):
                await self._relay(client, body, _Outcome(recorder, f"{scope['method']} {scope['path']}"))
        else:
            body = await client.decompressed(body, self._settings.body_limit, take=take)
            call = await self._captured_call(client, body, recorder)
            del body  # a long prompt need not wait for its answer
            if call is not None:
                await call.run()

    def _untagged(self, scope: Scope) -> None:
        """Tell once of a call that is served and not captured: a wrong base URL is seen nowhere else."""
        if self._count_untagged is None:
            return
        self._count_untagged()
        if not self._told_untagged:
            self._told_untagged = True
            _logger.warning(
                "%s %s was served but not captured, because its path names no rollout: give agents "
                "http://HOST:PORT/ng-rollout/ROLLOUT/training-token-capture as their base URL. This is logged once; "
                "tokcap_calls_untagged_total counts such calls.",
                scope["method"],
                scope["path"],
            )

    async def _captured_call(self, client: Client, raw: bytes, recorder: CallRecorder) -> CapturedCall | None:
        """The call of a captured endpoint, begun; None if it was answered already."""
        headers = header_texts(client.scope["headers"])
        session = session_headers(headers, self._settings.session_headers)
        try:
            call = self._prepared(client, raw, recorder, self._weights.of_call(headers))
        except Exception as error:
            # A mistake in an engine adapter costs the capture of a call, never the call.
            _logger.exception("the engine adapter failed")
            call, unread = None, _Outcome(recorder, f"{type(error).__name__}: {error}", reason=reasons.CAPTURE_FAILED)
        else:
            # The engine's own error is the answer. Should it be none, the call was not captured.
            unread = _Outcome(recorder, "a body that cannot be read here")
        offers_tools = None if call is None else call.offers_tools
        told = recorder.context.origin
        recorder.context.origin = CallOrigin(told.agent, told.parent_agent, told.purpose, offers_tools, session)
        # Whatever the body is: what the gateway cannot read the engine may, and generate.
        begin = self._begun(client, recorder)
        plan: Plan | None = None
        if self._continuer is not None and call is not None and call.chat is not None:
            # What to send in place of the template's prompt, found while the intent is registered.
            decide = self._continuer.plan(call.chat, recorder.context.rollout_id, client.scope)
            begun, plan = await asyncio.gather(begin, decide)
        else:
            begun = await begin
        if not begun:
            return None
        if call is None:
            await self._relay(client, raw, unread)
        elif plan is not None:
            call.follow(plan, raw)
        return call

    def _prepared(
        self, client: Client, raw: bytes, recorder: CallRecorder, stamp: Callable[[], str | None]
    ) -> CapturedCall | None:
        """The call as the engine is to be asked; None if the body cannot be read."""
        body = CallBody.parse(self._engine.paths[client.scope["path"]], raw)
        if body is None:
            return None
        body.decide_streaming(self._engine, self._settings.streaming)
        sent = body.for_engine(self._engine, raw)
        if sent is None:
            return None
        recorder.context.model = body.model
        return CapturedCall(
            client,
            body,
            sent,
            recorder,
            engine=self._engine,
            upstream=self._upstream,
            settings=self._settings,
            known=self._known,
            stamp=stamp,
        )

    async def _begun(self, client: Client, recorder: CallRecorder) -> bool:
        """Register the intent; if that fails the call is not dispatched, and the client is told."""
        try:
            await recorder.begin()
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
                    await outcome.answered(response)
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
            if outcome is None:
                _logger.warning("%s %s: %s", client.scope["method"], client.scope["path"], error)
            else:
                await outcome.failed(str(error), sent=error.sent)
            if not client.started:
                await client.send_error(error.status, error.told, "upstream_unavailable")


def _problem(scope: Scope) -> str:
    """Why a request is refused: what it is sorted by must be what the engine sees, to the last byte."""
    raw: bytes = scope.get("raw_path") or b"/"
    if not scope["path"].startswith("/") or not raw.startswith(b"/") or scope["method"] == "CONNECT":
        # "*", "http://elsewhere/" and "@elsewhere/" would not be below the upstream.
        return "The request target must begin with a slash, and the method must not be CONNECT."
    if b"#" in raw or b"#" in scope.get("query_string", b""):
        # Of what follows it the engine would see nothing.
        return "The request target must not have a fragment (#)."
    headers = {name.lower(): value.strip().lower() for name, value in scope["headers"]}
    framed = b"content-length" in headers, b"transfer-encoding" in headers
    if all(framed) or headers.get(b"transfer-encoding", b"chunked") != b"chunked":
        # Two servers may disagree about where such a request ends (RFC 9112, section 11.2).
        return "Send either a content-length or a transfer-encoding, which must be chunked."
    if any(framed) and b"upgrade" in headers and headers.get(b"content-length") != b"0":
        # httptools takes the body for the new protocol.
        return "A request with a body must not ask for another protocol (upgrade)."
    return ""


class _Outcome:
    """Records the outcome of a call that could generate and is not captured, once, and before its response ends.

    ``reason`` says why nothing is captured where there is a response.
    """

    def __init__(self, recorder: CallRecorder, what: str, *, reason: str = reasons.UNCAPTURED_ENDPOINT) -> None:
        self._recorder = recorder
        self._what = what
        self._reason = reason
        self._settled = False

    async def answered(self, response: Response) -> None:
        """The engine answered with this response, of which the head is known."""
        self._settled = True
        status, elsewhere = response.status, redirection(response)
        if elsewhere is not None:
            await self._recorder.flag(reasons.UNCAPTURED_ENDPOINT, f"{self._what}: HTTP {status} to {elsewhere}")
        elif is_refusal(status):
            await self._recorder.refuse(f"HTTP {status}")
        elif status < 300:
            await self._recorder.flag(self._reason, self._what)
        else:
            await self._recorder.flag(reasons.UNKNOWN_OUTCOME, f"{self._what}: HTTP {status}")

    async def failed(self, problem: str, *, sent: bool) -> None:
        """There is no answer, or it broke off."""
        if self._settled:
            return
        if sent:
            await self._recorder.flag(reasons.UNKNOWN_OUTCOME, f"{self._what}: {problem}")
        else:
            await self._recorder.refuse(problem)
