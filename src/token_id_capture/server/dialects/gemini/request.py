"""A generateContent request as a chat completion. Its model and whether it streams are in its path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from token_id_capture.server.dialects.chat import ChatRequest, ClientTool, Dialect, TranslationOptions, capped
from token_id_capture.server.dialects.fields import (
    InvalidRequestError,
    Place,
    read_count,
    read_flag,
    read_integer,
    read_list,
    read_number,
    read_object,
    read_text,
    read_texts,
    shown,
    unsupported,
)
from token_id_capture.server.dialects.gemini.conversation import Conversation

_MODES: Final = {"AUTO": "auto", "MODE_UNSPECIFIED": "auto", "VALIDATED": "auto", "ANY": "required", "NONE": "none"}
_NUMBERS: Final = {
    "temperature": "temperature",
    "topP": "top_p",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
}
_INTEGERS: Final = {"topK": "top_k", "seed": "seed"}
_CONFIG: Final = "generationConfig"


def read_gemini_request(
    body: Mapping[str, Any], options: TranslationOptions, *, model: str, streams: bool
) -> ChatRequest:
    """Translate a request.

    Raises:
        InvalidRequestError: a field has the wrong type, or a chat completion has no place for it.
    """
    if not model:
        raise InvalidRequestError("model", "the path names no model: send to /v1beta/models/MODEL:generateContent")
    if body.get("cachedContent") is not None:
        raise InvalidRequestError("cachedContent", "the gateway keeps no earlier content; send it whole")
    chat: dict[str, Any] = {"model": options.model or model}
    request = ChatRequest(Dialect.GEMINI, chat, model, streams, shows_reasoning=False)
    chat["messages"] = Conversation(options.history).read(body)
    _read_tools(body, request)
    _read_config(read_object(body.get(_CONFIG) or {}, _CONFIG), request, options)
    if streams:
        chat.update(stream=True, stream_options={"include_usage": True})
    return request


def _read_tools(body: Mapping[str, Any], request: ChatRequest) -> None:
    functions: list[dict[str, Any]] = []
    for index, item in enumerate(read_list(body.get("tools") or [], "tools")):
        tool = read_object(item, ("tools", index))
        field = ("tools", index, "functionDeclarations")
        for position, declared in enumerate(read_list(tool.get("functionDeclarations") or [], field)):
            place = (field, position)
            function = _function(read_object(declared, place), place)
            functions.append({"type": "function", "function": function})
            request.tools[function["name"]] = ClientTool(function["name"])
        request.left_out.extend(f"tool {name}" for name in tool if name != "functionDeclarations")
    if functions:
        request.body["tools"] = functions
    _read_calling(read_object(body.get("toolConfig") or {}, "toolConfig"), request)


def _read_calling(config: dict[str, Any], request: ChatRequest) -> None:
    field = ("toolConfig", "functionCallingConfig")
    calling = read_object(config.get("functionCallingConfig") or {}, field)
    if calling.get("mode") is None:
        return
    mode = read_text(calling["mode"], (field, "mode"))
    if mode not in _MODES:
        raise unsupported(mode, (field, "mode"), f"modes are {', '.join(_MODES)}")
    if not request.tools:
        return
    allowed = read_texts(calling.get("allowedFunctionNames") or [], (field, "allowedFunctionNames"))
    for index, name in enumerate(allowed):
        if name not in request.tools:
            raise InvalidRequestError((field, "allowedFunctionNames", index), f"no function has the name {shown(name)}")
    if len(allowed) == 1 and mode == "ANY":
        request.body["tool_choice"] = {"type": "function", "function": {"name": allowed[0]}}
    else:
        request.body["tool_choice"] = _MODES[mode]


def _function(declared: dict[str, Any], field: Place) -> dict[str, Any]:
    function: dict[str, Any] = {"name": read_text(declared.get("name"), (field, "name"))}
    if declared.get("description") is not None:
        function["description"] = read_text(declared["description"], (field, "description"))
    if declared.get("parametersJsonSchema") is not None:
        function["parameters"] = read_object(declared["parametersJsonSchema"], (field, "parametersJsonSchema"))
    else:
        parameters = read_object(declared.get("parameters") or {}, (field, "parameters"))
        function["parameters"] = json_schema(parameters) if parameters else {"type": "object", "properties": {}}
    return function


def json_schema(schema: Any) -> Any:
    """An OpenAPI schema, whose types are in capitals, as JSON schema."""
    if isinstance(schema, list):
        return [json_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: value.lower() if name == "type" and isinstance(value, str) else json_schema(value)
        for name, value in schema.items()
    }


def _read_config(config: dict[str, Any], request: ChatRequest, options: TranslationOptions) -> None:
    chat = request.body
    if config.get("maxOutputTokens") is not None:
        asked = read_count(config["maxOutputTokens"], (_CONFIG, "maxOutputTokens"))
        chat["max_tokens"] = capped(asked, options.max_tokens)
    for name, known in _NUMBERS.items():
        if config.get(name) is not None:
            chat[known] = read_number(config[name], (_CONFIG, name))
    for name, known in _INTEGERS.items():
        if config.get(name) is not None:
            value = config[name]  # google-genai sends topK as 64.0
            whole = int(value) if isinstance(value, float) and value.is_integer() else value
            chat[known] = read_integer(whole, (_CONFIG, name))
    if config.get("stopSequences") and (stops := read_texts(config["stopSequences"], (_CONFIG, "stopSequences"))):
        chat["stop"] = stops
    if (count := config.get("candidateCount")) is not None and read_integer(count, (_CONFIG, "candidateCount")) != 1:
        raise InvalidRequestError((_CONFIG, "candidateCount"), "a response has one candidate")
    _read_thinking(read_object(config.get("thinkingConfig") or {}, (_CONFIG, "thinkingConfig")), request)
    _read_format(config, chat)


def _read_thinking(thinking: dict[str, Any], request: ChatRequest) -> None:
    field = (_CONFIG, "thinkingConfig")
    if thinking.get("includeThoughts") is not None:
        request.shows_reasoning = read_flag(thinking["includeThoughts"], (field, "includeThoughts"))
    budget = thinking.get("thinkingBudget")
    if budget is not None and read_integer(budget, (field, "thinkingBudget")) == 0:
        request.body["chat_template_kwargs"] = {"enable_thinking": False}


def _read_format(config: dict[str, Any], chat: dict[str, Any]) -> None:
    schema = config.get("responseJsonSchema")
    if schema is None and config.get("responseSchema") is not None:
        schema = json_schema(read_object(config["responseSchema"], (_CONFIG, "responseSchema")))
    if schema is not None:
        schema = read_object(schema, (_CONFIG, "responseJsonSchema"))
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    elif config.get("responseMimeType") == "application/json":
        chat["response_format"] = {"type": "json_object"}
