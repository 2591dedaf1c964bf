"""One entrance for all dialects: a request in, and the responses and streams that fit it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from token_id_capture.server.dialects.blocks import BlockWriter
from token_id_capture.server.dialects.chat import ChatRequest, Dialect, Generation, TranslationOptions
from token_id_capture.server.dialects.fields import InvalidRequestError, read_object
from token_id_capture.server.dialects.gemini.request import read_gemini_request
from token_id_capture.server.dialects.gemini.response import gemini_response
from token_id_capture.server.dialects.gemini.stream import GeminiWriter
from token_id_capture.server.dialects.messages.request import read_messages_request
from token_id_capture.server.dialects.messages.response import messages_response
from token_id_capture.server.dialects.messages.stream import MessagesWriter
from token_id_capture.server.dialects.paths import Target
from token_id_capture.server.dialects.responses.request import read_responses_request
from token_id_capture.server.dialects.responses.response import responses_response
from token_id_capture.server.dialects.responses.stream import ResponsesWriter


def read_json(raw: bytes) -> dict[str, Any]:
    """A client's body.

    Raises:
        InvalidRequestError: it is not a JSON object.
    """
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError("", f"the request body is not JSON: {error}") from error
    return read_object(body, "the request body")


def read_request(target: Target, body: Mapping[str, Any], options: TranslationOptions) -> ChatRequest:
    """A client's request as a chat completion.

    Raises:
        InvalidRequestError: a field has the wrong type, or a chat completion has no place for it.
    """
    try:
        if target.dialect is Dialect.MESSAGES:
            return read_messages_request(body, options)
        if target.dialect is Dialect.RESPONSES:
            return read_responses_request(body, options)
        return read_gemini_request(body, options, model=target.model, streams=target.streams)
    except RecursionError as error:
        raise InvalidRequestError("", "the request is nested too deeply") from error


def translated_response(generation: Generation, request: ChatRequest, shown_id: str) -> dict[str, Any]:
    """A whole response in the client's dialect. ``shown_id`` is what the ids that the client sees are made of."""
    if request.dialect is Dialect.MESSAGES:
        return messages_response(generation, request, shown_id)
    if request.dialect is Dialect.RESPONSES:
        return responses_response(generation, request, shown_id)
    return gemini_response(generation, request, shown_id)


def stream_writer(request: ChatRequest, shown_id: str, *, as_events: bool) -> BlockWriter:
    """What writes the stream of a request. Without ``as_events`` Gemini's is one JSON array."""
    if request.dialect is Dialect.MESSAGES:
        return MessagesWriter(request, shown_id)
    if request.dialect is Dialect.RESPONSES:
        return ResponsesWriter(request, shown_id)
    return GeminiWriter(request, shown_id, as_events=as_events)


def shown_response_id(dialect: Dialect, shown_id: str) -> str:
    """The id of a response as its client sees it."""
    return {Dialect.MESSAGES: "msg_", Dialect.RESPONSES: "resp_"}.get(dialect, "") + shown_id
