"""One captured generation: from the intent that is registered to the response that is answered.

::

    open intent -> engine ->  not reached, 4xx     refuse the intent (503 and 529 too)
                              3xx                  mark: the client may ask elsewhere
                              5xx, silence, break  mark; the intent stays open
                              a whole response        put the entries, then answer
                              a stream             pass events on; put the entries before the end
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import orjson

from token_id_capture import reasons
from token_id_capture.capture.recorder import CallRecorder
from token_id_capture.protocols import offers
from token_id_capture.server.continuity.plan import Plan
from token_id_capture.server.engines.base import Endpoint, Engine, TokenizesPrompts, reads_packed_arrays
from token_id_capture.server.http.client import Client, ClientGoneError, HangUpLimit
from token_id_capture.server.http.exchange import Exchanges, Response, header, is_refusal, redirection
from token_id_capture.server.http.upstream import RawHeaders, UpstreamError
from token_id_capture.server.prompt_ids import add_prompt_ids
from token_id_capture.server.settings import GatewaySettings
from token_id_capture.server.stream import StreamedResponse
from token_id_capture.server.wire.entries import CapturedRequest, NotCapturableError, entries_from
from token_id_capture.server.wire.fast_parse import BodyReader, ResponseBody
from token_id_capture.server.wire.prompt_cache import KnownTexts
from token_id_capture.server.wire.redaction import client_view
from token_id_capture.server.wire.request import CallBody, digests_of, media_parts
from token_id_capture.server.wire.response import EngineResponse, read_response
from token_id_capture.server.wire.synthesis import EVENT_STREAM, event_stream

_logger = logging.getLogger(__name__)
_MESSAGE_SHOWN = 300
_PLAIN = "identity"


class CapturedCall:
    """One generation request of a rollout, whose intent is registered. ``sent`` is the body for the engine."""

    def __init__(
        self,
        client: Client,
        body: CallBody,
        sent: bytes,
        recorder: CallRecorder,
        *,
        engine: Engine,
        upstream: Exchanges,
        settings: GatewaySettings,
        known: KnownTexts,
        stamp: Callable[[], str | None] | None = None,
    ) -> None:
        self._client = client
        self._body = body
        self._sent = [sent]  # taken out when it is sent
        self._engine = engine
        self._upstream = upstream
        self._settings = settings
        self._recorder = recorder
        self._plan: Plan | None = None
        self._bodies = BodyReader(known if reads_packed_arrays(engine) else None, recorder.context.rollout_id)
        self._request = CapturedRequest.of(body.members, settings.log_probs_mode, stamp)
        self._reader = engine.reader(body.endpoint, body.asked)
        hide_usage = body.streams and not body.asks_usage
        self._view = client_view(engine.hidden(body.endpoint, body.asked), hide_usage=hide_usage)

    @property
    def chat(self) -> Mapping[str, Any] | None:
        """The client's chat; None if it asked another endpoint."""
        return self._body.members if self._body.endpoint is Endpoint.CHAT else None

    @property
    def offers_tools(self) -> bool | None:
        """Whether the model may call a tool; None where the endpoint knows no tools."""
        return self._body.offers_tools

    def follow(self, plan: Plan, raw: bytes) -> None:
        """Send what was decided on the prompt of the client's request ``raw``."""
        self._plan = plan
        if plan.fields:
            sent = self._body.for_engine(self._engine, raw, plan.fields)
            if sent is None:
                self._plan = plan.unsent()
            else:
                self._sent = [sent]

    async def run(self) -> None:
        """Serve the call."""
        try:
            await self._client.limit_after_hang_up(self._settings.drain_seconds, self._serve)
        except ClientGoneError:
            detail = f"the client hung up, and the engine had not finished {self._settings.drain_seconds:g} s later"
            await self._recorder.flag(reasons.LOST_STREAM, detail)
        except UpstreamError as error:
            await self._failed(error)

    async def _serve(self, limit: HangUpLimit) -> None:
        async with self._upstream.open(self._client.scope, self._sent.pop(), plain=True) as response:
            if not 200 <= response.status < 300:
                await self._not_served(response, limit)
            elif (coding := _coding(response)) != _PLAIN:
                await self._unreadable(limit, f"it is compressed ({coding}), though it was asked for plain")
            elif response.is_event_stream:
                await self._streamed(response, limit)
            else:
                await self._whole(response, limit)

    async def _streamed(self, response: Response, limit: HangUpLimit) -> None:
        stream = StreamedResponse(
            self._client,
            response,
            self._body,
            self._reader,
            self._bodies,
            self._view,
            self._recorder,
            self._commit,
        )
        await stream.run(limit)

    async def _whole(self, response: Response, limit: HangUpLimit) -> None:
        body = await response.read()
        limit.lift()
        headers = response.headers
        read = self._bodies.whole(body)
        parsed = read.parsed
        if not (isinstance(parsed, dict) or (isinstance(parsed, list) and self._body.endpoint is Endpoint.GENERATE)):
            await self._unreadable(limit, "it is not a JSON object")
            return
        if isinstance(parsed, dict) and "choices" not in parsed and parsed.get("error") is not None:
            await self._recorder.flag(reasons.UNKNOWN_OUTCOME, _message(parsed, body))
        else:
            await self._commit(partial(read_response, self._reader, self._body.endpoint, parsed))
        try:
            body = self._view.response(read)
            if self._body.streams and not self._body.stream_upstream and isinstance(parsed, dict):
                headers = [(name, value) for name, value in headers if name.lower() != b"content-type"]
                headers.append((b"content-type", EVENT_STREAM))
                body = event_stream(self._body.endpoint, orjson.loads(body), with_usage=self._body.asks_usage)
        except ValueError as error:
            await self._withheld(f"the fields that the client did not ask for cannot be removed ({error})")
            return
        await self._client.response(response.status, _with_length(headers, body), body)

    async def _commit(self, read: Callable[[], EngineResponse]) -> None:
        """Store the call, or mark it with the reason why not."""
        context = self._recorder.context
        try:
            served = read()
            if self._settings.tokenize_prompts and offers(self._engine, TokenizesPrompts):
                await add_prompt_ids(served, self._engine, self._body, self._upstream, self._client.scope)
            # Images are long, and hashing them releases the interpreter lock.
            media = await asyncio.to_thread(digests_of, parts) if (parts := media_parts(self._body.members)) else ()
            entries = entries_from(context, self._request, served, media)
            links = [] if self._plan is None else self._plan.recorded(entries, served)
        except NotCapturableError as refused:
            await self._recorder.flag(refused.reason, refused.detail)
        except Exception as error:
            _logger.exception("reading the tokens of call %r failed", context.model_call_id)
            await self._recorder.flag(reasons.CAPTURE_FAILED, f"{type(error).__name__}: {error}")
        else:
            await self._recorder.commit(entries, links)

    async def _unreadable(self, limit: HangUpLimit, problem: str) -> None:
        """Mark a call whose response cannot be read here, and so may hold what its client must not see."""
        limit.lift()
        await self._recorder.flag(reasons.INVALID_TOKENS, f"the response cannot be read: {problem}")
        await self._withheld(problem)

    async def _withheld(self, problem: str) -> None:
        message = f"The engine's response is not passed on: {problem}."
        await self._client.send_error(502, message, "unreadable_response")

    async def _not_served(self, response: Response, limit: HangUpLimit) -> None:
        """Pass an error on. After a refusal the engine has generated nothing; after another, nobody knows."""
        body = await response.read()
        limit.lift()
        detail = f"HTTP {response.status}: {_message(_parsed(body), body)}"
        if (elsewhere := redirection(response)) is not None:
            await self._recorder.flag(reasons.UNCAPTURED_ENDPOINT, f"HTTP {response.status} to {elsewhere}")
        elif is_refusal(response.status):
            await self._recorder.refuse(detail)
        else:
            await self._recorder.flag(reasons.UNKNOWN_OUTCOME, detail)
        try:
            if _coding(response) != _PLAIN:
                raise ValueError("it is compressed")
            shown = self._view.response(ResponseBody.parse(body))
        except ValueError as error:
            message = f"The engine answered {response.status}, and its message is not passed on: {error}."
            await self._client.send_error(response.status, message, "unreadable_response")
            return
        await self._client.response(response.status, _with_length(response.headers, shown), shown)

    async def _failed(self, error: UpstreamError) -> None:
        if not error.sent:
            await self._recorder.refuse(str(error))
        else:
            await self._recorder.flag(reasons.UNKNOWN_OUTCOME, str(error))
        if not self._client.started:
            await self._client.send_error(error.status, error.told, "upstream_unavailable")


def _coding(response: Response) -> str:
    return (header(response, b"content-encoding") or _PLAIN).lower()


def _parsed(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None


def _message(parsed: Any, body: bytes) -> str:
    """The engine's own words, short."""
    error = parsed.get("error") if isinstance(parsed, dict) else None
    message = error.get("message") if isinstance(error, Mapping) else error
    text = message if isinstance(message, str) else body.decode(errors="replace")
    return text if len(text) <= _MESSAGE_SHOWN else text[: _MESSAGE_SHOWN - 3] + "..."


def _with_length(headers: RawHeaders, body: bytes) -> RawHeaders:
    kept = [(name, value) for name, value in headers if name.lower() != b"content-length"]
    return [*kept, (b"content-length", str(len(body)).encode())]
