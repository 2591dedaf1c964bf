"""The way back of a translated call: what the gateway sends, in the client's dialect."""

from __future__ import annotations

import logging
from typing import Any, Final

import orjson
from starlette.types import Message, Send

from token_id_capture.server.dialects.chat import ChatRequest, Dialect, read_generation
from token_id_capture.server.dialects.errors import (
    CONTEXT_LENGTH_CODE,
    abort_error,
    error_envelope,
    error_of,
)
from token_id_capture.server.dialects.stream import TranslatedStream
from token_id_capture.server.dialects.translate import stream_writer, translated_response
from token_id_capture.server.http.upstream import RawHeaders

_logger = logging.getLogger(__name__)

_EVENTS: Final = b"text/event-stream; charset=utf-8"
_JSON: Final = b"application/json"
_OF_THE_BODY: Final = frozenset({b"content-length", b"content-type", b"content-encoding"})


class _Translated:
    """Takes a response apart; nothing that fails in here may fail the capture, which sends through it."""

    def __init__(self, dialect: Dialect, send: Send) -> None:
        self._out = send
        self._dialect = dialect
        self._begun = False
        self._status = 0
        self._headers: RawHeaders = []
        self._pieces: list[bytes] = []
        self._failed = False

    async def send(self, message: Message) -> None:
        """Take a message of the gateway.

        Raises:
            OSError: the client is gone.
        """
        if self._failed:
            return
        try:
            await (self._start(message) if message["type"] == "http.response.start" else self._body(message))
        except OSError:
            raise
        except Exception:
            _logger.exception("a response could not be translated")
            self._failed = True
            if not self._begun:
                await self._answer(
                    *_error(self._dialect, 502, "the engine's response cannot be translated", "server_error")
                )

    async def _start(self, message: Message) -> None:
        self._status = message["status"]
        self._headers = [(name, value) for name, value in message["headers"] if name.lower() not in _OF_THE_BODY]

    async def _body(self, message: Message) -> None:
        self._pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            status, body = self._whole(b"".join(self._pieces))
            await self._answer(status, body)

    def _whole(self, body: bytes) -> tuple[int, dict[str, Any]]:
        """Status and body for the client, of a response that came whole."""
        raise NotImplementedError

    async def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = orjson.dumps(body)
        await self._head(status, _JSON, [(b"content-length", str(len(data)).encode())])
        await self._out({"type": "http.response.body", "body": data, "more_body": False})

    async def _head(self, status: int, content_type: bytes, more: RawHeaders | None = None) -> None:
        self._begun = True
        headers = [*self._headers, (b"content-type", content_type), *(more or [])]
        await self._out({"type": "http.response.start", "status": status, "headers": headers})


class TranslatedResponse(_Translated):
    """The response of a generation; ``codex``: the client is Codex, which understands one error only in a stream."""

    def __init__(self, request: ChatRequest, shown_id: str, send: Send, *, as_events: bool, codex: bool) -> None:
        super().__init__(request.dialect, send)
        self._request = request
        self._shown_id = shown_id
        self._as_events = as_events
        self._codex = codex
        self._stream: TranslatedStream | None = None

    async def _start(self, message: Message) -> None:
        await super()._start(message)
        self._headers.append((b"request-id", self._shown_id.encode()))
        types = [value for name, value in message["headers"] if name.lower() == b"content-type"]
        if message["status"] == 200 and any(value.lower().startswith(b"text/event-stream") for value in types):
            writer = stream_writer(self._request, self._shown_id, as_events=self._as_events)
            self._stream = TranslatedStream(writer, self._shown_id)
            await self._head(200, _EVENTS if self._as_events else _JSON)
            await self._write(self._stream.start())

    async def _body(self, message: Message) -> None:
        if self._stream is None:
            await super()._body(message)
            return
        await self._write(self._stream.feed(message.get("body", b"")))
        if not message.get("more_body", False):
            rest = self._stream.end()
            if rest is None:
                return  # an unfinished body breaks the connection, as the engine's broke
            await self._out({"type": "http.response.body", "body": rest, "more_body": False})

    def _whole(self, body: bytes) -> tuple[int, dict[str, Any]]:
        parsed = _parsed(body)
        generation = read_generation(parsed, self._shown_id) if self._status < 300 else None
        if generation is None:
            return _error(self._dialect, *error_of(self._status, parsed or body.decode(errors="replace")))
        if not generation.ending.is_aborted:
            return self._status, translated_response(generation, self._request, self._shown_id)
        status, message, code = abort_error()
        return _error(self._dialect, status if self._dialect is Dialect.MESSAGES else 503, message, code)

    async def _answer(self, status: int, body: dict[str, Any]) -> None:
        error = body.get("error") or {}
        code = error.get("code")
        if self._codex and self._request.streams and code == CONTEXT_LENGTH_CODE:
            # Codex shortens its history on this event alone; an HTTP 400 ends its turn.
            writer = stream_writer(self._request, self._shown_id, as_events=True)
            await self._head(200, _EVENTS)
            failed = writer.start() + writer.fail(status, error["message"], code)
            await self._out({"type": "http.response.body", "body": failed, "more_body": False})
            return
        await super()._answer(status, body)

    async def _write(self, data: bytes) -> None:
        if data:
            await self._out({"type": "http.response.body", "body": data, "more_body": True})


class TranslatedCount(_Translated):
    """The response to a question for the length of a prompt."""

    def _whole(self, body: bytes) -> tuple[int, dict[str, Any]]:
        parsed = _parsed(body)
        count = parsed.get("input_tokens" if self._dialect is Dialect.MESSAGES else "count")
        if self._status >= 300:
            return _error(self._dialect, *error_of(self._status, parsed or body.decode(errors="replace")))
        if type(count) is not int:
            return _error(self._dialect, 502, "the engine does not count the tokens of a chat", "server_error")
        return self._status, parsed if self._dialect is Dialect.MESSAGES else {"totalTokens": count}


def _error(dialect: Dialect, status: int, message: str, code: str) -> tuple[int, dict[str, Any]]:
    return status, error_envelope(dialect, status, message, code)


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
