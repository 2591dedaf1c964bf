"""A Responses request as a chat completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from token_id_capture.server.dialects.chat import (
    ChatRequest,
    Dialect,
    TranslationOptions,
    capped,
    place_system_messages,
)
from token_id_capture.server.dialects.fields import (
    InvalidRequestError,
    read_count,
    read_flag,
    read_integer,
    read_number,
    read_object,
    read_text,
    read_texts,
    unsupported,
)
from token_id_capture.server.dialects.responses.conversation import Conversation
from token_id_capture.server.dialects.responses.tools import read_tool_choice, read_tools

# What would be looked up in a history that only OpenAI's own servers keep.
_KEPT_ELSEWHERE: Final = ("previous_response_id", "conversation", "prompt")
_EFFORTS: Final = {"minimal": "low", "xhigh": "high"}
# Not the instructions and tools, which are most of a request: each event that holds the response would repeat them.
_ECHOED: Final = ("metadata", "parallel_tool_calls", "temperature", "tool_choice", "top_p")
_SEALS: Final = "reasoning.encrypted_content"


def read_responses_request(body: Mapping[str, Any], options: TranslationOptions) -> ChatRequest:
    """Translate a request.

    Raises:
        InvalidRequestError: a field has the wrong type, or a chat completion has no place for it.
    """
    for name in _KEPT_ELSEWHERE:
        if body.get(name) is not None:
            raise InvalidRequestError(name, "the gateway keeps no earlier responses; send the whole input")
    if body.get("background"):
        raise InvalidRequestError("background", "a response is generated while its client waits")
    model = read_text(body.get("model"), "model")
    chat: dict[str, Any] = {"model": options.model or model}
    request = ChatRequest(Dialect.RESPONSES, chat, model)
    functions = read_tools(body, request)
    messages = Conversation(options.history, request.tools).read(body)
    chat["messages"] = place_system_messages(messages, options.inline_system)
    if functions:
        chat["tools"] = functions
    read_tool_choice(body, request)
    _read_limits(body, chat, options)
    _read_output(body, chat)
    included = read_texts(body["include"], "include") if body.get("include") is not None else []
    request.seals_reasoning = _SEALS in included
    request.echoed = {name: body[name] for name in _ECHOED if body.get(name) is not None}
    if body.get("stream") is not None and read_flag(body["stream"], "stream"):
        request.streams = True
        chat.update(stream=True, stream_options={"include_usage": True})
    return request


def _read_limits(body: Mapping[str, Any], chat: dict[str, Any], options: TranslationOptions) -> None:
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = capped(read_count(body["max_output_tokens"], "max_output_tokens"), options.max_tokens)
    for name in ("temperature", "top_p"):
        if body.get(name) is not None:
            chat[name] = read_number(body[name], name)
    if body.get("seed") is not None:
        chat["seed"] = read_integer(body["seed"], "seed")


def _read_output(body: Mapping[str, Any], chat: dict[str, Any]) -> None:
    reasoning = read_object(body["reasoning"], "reasoning") if body.get("reasoning") is not None else {}
    if reasoning.get("effort") is not None:
        effort = read_text(reasoning["effort"], "reasoning.effort")
        chat["reasoning_effort"] = _EFFORTS.get(effort, effort)
    text = read_object(body["text"], "text") if body.get("text") is not None else {}
    if text.get("format") is None:
        return
    output = read_object(text["format"], "text.format")
    kind = output.get("type")
    if kind == "json_schema":
        schema: dict[str, Any] = {"name": read_text(output.get("name", "output"), "text.format.name")}
        schema["schema"] = read_object(output.get("schema"), "text.format.schema")
        if output.get("strict") is not None:
            schema["strict"] = read_flag(output["strict"], "text.format.strict")
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif kind == "json_object":
        chat["response_format"] = {"type": "json_object"}
    elif kind != "text":
        raise unsupported(kind, "text.format.type", "types are text, json_schema and json_object")
