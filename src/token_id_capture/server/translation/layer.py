"""Messages, Responses and Gemini in front of the gateway, which knows chat completions alone.

A pure ASGI layer: it reads the client's body, hands the gateway a chat completion in its place, and turns
what the gateway sends back into the client's dialect. Intents, capture, holding back the end and draining
stay the gateway's. What belongs to no captured rollout passes untouched.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, NamedTuple
from urllib.parse import unquote_to_bytes

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from token_id_capture.capture.recorder import CallRecorder, recorder_in
from token_id_capture.errors import StoreError
from token_id_capture.provenance import Translation
from token_id_capture.server.dialects.chat import ChatRequest, Dialect, History, InlineSystem, TranslationOptions
from token_id_capture.server.dialects.fields import InvalidRequestError, read_list, read_object
from token_id_capture.server.dialects.paths import Action, Target, target_of
from token_id_capture.server.dialects.translate import read_json, read_request, shown_response_id
from token_id_capture.server.http.client import Client, ClientGoneError, RefusedRequestError
from token_id_capture.server.http.limits import RETRY_AFTER_SECONDS, BodyBudget
from token_id_capture.server.settings import GatewaySettings
from token_id_capture.server.translation.answers import AnswerMemory
from token_id_capture.server.translation.inline_system import InlineSystemProbe
from token_id_capture.server.translation.responses import TranslatedCount, TranslatedResponse

_logger = logging.getLogger(__name__)

_CHAT_PATH: Final = "/v1/chat/completions"
_COUNT_PATH: Final = "/v1/messages/count_tokens"
_TOKENIZE_PATH: Final = "/tokenize"
_TOKENIZED: Final = ("model", "messages", "tools")
# They say how to call the client's own provider, or describe a body that is replaced.
_DROPPED_PREFIXES: Final = (b"anthropic-", b"openai-", b"x-goog-")
_OF_THE_BODY: Final = frozenset({b"content-length", b"content-encoding", b"transfer-encoding"})
_DROPPED_HEADERS: Final = _OF_THE_BODY | {b"content-type", b"x-api-key"}
# What a header can carry, which a percent-encoded key of a query need not be.
_VISIBLE: Final = re.compile(rb"[\x21-\x7e]+")
_CHAT_PATHS: Final = frozenset({_CHAT_PATH, "/chat/completions"})


class DialectTranslation:
    """Translates calls of captured rollouts for ``app``, the gateway."""

    def __init__(
        self,
        app: ASGIApp,
        settings: GatewaySettings,
        probe: InlineSystemProbe,
        *,
        budget: BodyBudget,
        answers: AnswerMemory | None = None,
        count_refusal: Callable[[str], None] = lambda code: None,
    ) -> None:
        self._app = app
        self._budget = budget
        self._answers = answers
        self._settings = settings
        self._probe = probe
        self._count_refusal = count_refusal
        self._chat_history = History(settings.chat_history)
        self._options = TranslationOptions(
            settings.model, settings.max_tokens, InlineSystem.KEEP, History(settings.history)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        recorder = recorder_in(scope)
        target = target_of(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        restores_chat = self._chat_history is not History.OFF and self._answers is not None and _is_chat(scope)
        if recorder is None or not (target or restores_chat):
            await self._app(scope, receive, send)
            return
        client = Client(scope, receive, send)
        try:
            with self._budget.share() as take:
                body = await client.read_body(
                    self._settings.body_limit, longest_silence=self._settings.client_timeout, take=take
                )
                body = await client.decompressed(body, self._settings.body_limit, take=take)
                if target is None:
                    call = await self._chat(body, recorder, scope, send)
                else:
                    call = await self._translated(target, read_json(body), recorder, scope, send)
                del body  # what was translated need not wait for its answer
        except ClientGoneError:
            return
        except RefusedRequestError as refused:
            self._count_refusal(refused.code)
            _logger.warning("a request was refused: %s", refused)
            wait = {"retry-after": str(RETRY_AFTER_SECONDS)} if refused.status == 503 else {}
            await client.send_error(refused.status, str(refused), refused.code, **wait)
        except InvalidRequestError as error:
            await client.send_error(400, str(error), "invalid_request_error")
        else:
            await call.forward(self._app, scope, receive)

    async def _translated(
        self, target: Target, body: dict[str, Any], recorder: CallRecorder, scope: Scope, send: Send
    ) -> _InnerCall:
        """What to ask the gateway in place of a request."""
        if target.action is Action.COUNT:
            return await self._count(target, body, scope, send)
        request = await self._read(target, body, scope)
        shown_id = recorder.context.model_call_id
        recorder.context.translation = Translation(
            request.dialect,
            request.client_model,
            shown_response_id(request.dialect, shown_id),
            tuple(request.left_out),
            self._options.history,
            await self._restored(recorder.context.rollout_id, request.body["messages"], self._options.history),
        )
        # Gemini's streams are one JSON array unless the query asks for events.
        as_events = b"alt=sse" in scope["query_string"] or request.dialect is not Dialect.GEMINI
        response = TranslatedResponse(request, shown_id, send, as_events=as_events, codex=_is_codex(scope))
        return _InnerCall(_CHAT_PATH, request.encoded(), response.send)

    async def _chat(self, raw: bytes, recorder: CallRecorder, scope: Scope, send: Send) -> _InnerCall:
        """A native chat completion with its history put back; its own bytes if there is nothing to put back."""
        call = _InnerCall(scope["path"], raw, send, native=True)
        try:
            body = read_json(raw)
            messages = [read_object(message, "messages") for message in read_list(body.get("messages"), "messages")]
        except InvalidRequestError:
            return call  # for the engine to complain about
        changed = await self._restored(recorder.context.rollout_id, messages, self._chat_history)
        return call._replace(body=orjson.dumps(body)) if changed else call

    async def _restored(self, rollout_id: str, messages: list[dict[str, Any]], history: History) -> int:
        """Put messages back as the policy wrote them; a history that cannot be read is taken as it is."""
        if self._answers is None:
            return 0
        try:
            return await self._answers.restore(rollout_id, messages, history)
        except StoreError as error:
            _logger.warning("the history of rollout %r is not restored: %s", rollout_id, error)
            return 0

    async def _read(self, target: Target, body: dict[str, Any], scope: Scope) -> ChatRequest:
        """The request, with system messages behind others as the settings, or else the engine, will have them."""
        request = read_request(target, body, self._options)
        if not request.has_inline_system:
            return request
        mode = self._settings.inline_system
        known = await self._probe.mode(scope, request.body["model"]) if mode == "auto" else InlineSystem(mode)
        if known is InlineSystem.KEEP:
            return request
        return read_request(target, body, replace(self._options, inline_system=known))

    async def _count(self, target: Target, body: dict[str, Any], scope: Scope, send: Send) -> _InnerCall:
        """Count the tokens of a prompt. Nothing is generated, so nothing is recorded."""
        counted = TranslatedCount(target.dialect, send)
        if target.dialect is Dialect.MESSAGES:
            if self._settings.model is not None:
                body["model"] = self._settings.model
            return _InnerCall(_COUNT_PATH, ChatRequest(target.dialect, body, "").encoded(), counted.send)
        inner = body.get("generateContentRequest")
        chat = await self._read(target, inner if isinstance(inner, dict) else body, scope)
        chat.body = {name: chat.body[name] for name in _TOKENIZED if name in chat.body}
        return _InnerCall(_TOKENIZE_PATH, chat.encoded(), counted.send)


class _InnerCall(NamedTuple):
    """A call of the gateway, and who takes its response."""

    path: str
    body: bytes
    send: Send
    native: bool = False

    async def forward(self, app: ASGIApp, scope: Scope, receive: Receive) -> None:
        length = (b"content-length", str(len(self.body)).encode())
        if self.native:
            kept = [(name, value) for name, value in scope["headers"] if name.lower() not in _OF_THE_BODY]
            inner = dict(scope, headers=[*kept, length])
        else:
            inner = dict(
                scope,
                path=self.path,
                raw_path=self.path.encode(),
                query_string=b"",
                headers=[*_headers(scope), length],
            )
        await app(inner, _replayed(self.body, receive), self.send)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Gives ``body`` as the request's, and then what the client still sends: that it hung up."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay


def _headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """The client's headers for the engine, with its key where chat has it."""
    kept: list[tuple[bytes, bytes]] = [(b"content-type", b"application/json")]
    keys: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        low = name.lower()
        if low in (b"x-api-key", b"x-goog-api-key", b"authorization"):
            keys.setdefault(low, value)
        elif low not in _DROPPED_HEADERS and not low.startswith(_DROPPED_PREFIXES):
            kept.append((name, value))
    for part in scope["query_string"].split(b"&"):
        if part.startswith(b"key=") and _VISIBLE.fullmatch(key := unquote_to_bytes(part[4:])):
            keys.setdefault(b"key", key)
    if b"authorization" in keys:
        kept.append((b"authorization", keys[b"authorization"]))
    elif keys:
        kept.append((b"authorization", b"Bearer " + next(iter(keys.values()))))
    return kept


def _is_chat(scope: Scope) -> bool:
    return scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in _CHAT_PATHS


def _is_codex(scope: Scope) -> bool:
    return any(name.lower() == b"originator" and value.startswith(b"codex") for name, value in scope["headers"])
