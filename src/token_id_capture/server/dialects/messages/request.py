"""A Messages request as a chat completion.

Where engines translate Messages themselves, this follows vLLM, so that a prompt has the same ids either way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from token_id_capture.server.dialects.chat import (
    ChatRequest,
    ClientTool,
    Dialect,
    History,
    TranslationOptions,
    arguments_text,
    capped,
    place_system_messages,
)
from token_id_capture.server.dialects.fields import (
    InvalidRequestError,
    read_count,
    read_flag,
    read_integer,
    read_list,
    read_number,
    read_object,
    read_objects,
    read_text,
    read_texts,
    shown,
    unsupported,
)
from token_id_capture.server.dialects.parts import content_of, image_part, text_part
from token_id_capture.server.dialects.seal import opened

# Claude Code's first system block holds a hash of the conversation: it is not part of the prompt, as in vLLM.
_ATTRIBUTION: Final = "x-anthropic-billing-header"
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_ASSISTANT_BLOCKS: Final = "an assistant message has blocks of text, thinking and tool_use"
_USER_BLOCKS: Final = "a user message has blocks of text, image, tool_result, and documents of text"


def read_messages_request(body: Mapping[str, Any], options: TranslationOptions) -> ChatRequest:
    """Translate a request.

    Raises:
        InvalidRequestError: a field has the wrong type, or a chat completion has no place for it.
    """
    if body.get("mcp_servers"):
        raise InvalidRequestError("mcp_servers", "the gateway calls no MCP servers; offer their tools as tools")
    model = read_text(body.get("model"), "model")
    messages = _Conversation(options.history).read(body)
    chat: dict[str, Any] = {"model": options.model or model}
    chat["messages"] = place_system_messages(messages, options.inline_system)
    request = ChatRequest(Dialect.MESSAGES, chat, model)
    _read_tools(body, request)
    _read_limits(body, chat, options)
    _read_output(body, chat)
    if body.get("stream") is not None and read_flag(body["stream"], "stream"):
        request.streams = True
        chat.update(stream=True, stream_options={"include_usage": True})
    if messages[-1]["role"] == "assistant":
        chat.update(continue_final_message=True, add_generation_prompt=False)
    return request


class _Conversation:
    """Reads the messages in order, and knows which calls they hold."""

    def __init__(self, history: History) -> None:
        self._opens_seals = history is not History.OFF
        self._messages: list[dict[str, Any]] = []
        self._calls: set[str] = set()

    def read(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        if body.get("system") is not None and (system := _system_text(body["system"], "system")):
            self._messages.append({"role": "system", "content": system})
        turns = read_objects(body.get("messages"), "messages")
        if not turns:
            raise InvalidRequestError("messages", "at least one message is required")
        for turn in turns:
            role, content = turn.get("role"), turn.get("content")
            try:
                if role == "user":
                    self._add_user(content)
                elif role == "assistant":
                    self._add_assistant(content)
                elif role == "system":
                    self._messages.append({"role": "system", "content": _system_text(content, "content")})
                else:
                    raise unsupported(role, "role", "roles are user, assistant and system")
            except InvalidRequestError as error:
                error.within("messages", turns, turn)
                raise
        return self._messages

    def _add_user(self, content: Any) -> None:
        if isinstance(content, str):
            self._messages.append({"role": "user", "content": content})
            return
        parts: list[dict[str, Any]] = []
        images: list[dict[str, Any]] = []
        has_results = False
        for block in read_objects(content, "content"):
            try:
                if block.get("type") == "tool_result":
                    has_results = True
                    self._add_result(block, images)
                else:
                    parts.append(_user_part(block))
            except InvalidRequestError as error:
                error.within("content", content, block)
                raise
        if parts or images or not has_results:
            self._messages.append({"role": "user", "content": content_of(images + parts)})

    def _add_result(self, block: dict[str, Any], images: list[dict[str, Any]]) -> None:
        call_id = read_text(block.get("tool_use_id"), "tool_use_id")
        if call_id not in self._calls:
            raise InvalidRequestError("tool_use_id", f"no earlier message calls a tool as {shown(call_id)}")
        content = block.get("content")
        text = content if isinstance(content, str) else _result_text(content, images)
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _add_assistant(self, content: Any) -> None:
        if isinstance(content, str):
            self._messages.append({"role": "assistant", "content": content})
            return
        text = reasoning = ""
        calls: list[dict[str, Any]] = []
        for block in read_objects(content, "content"):
            try:
                kind = block.get("type")
                if kind == "tool_use":
                    calls.append(self._call(block))
                elif kind == "text":
                    text += read_text(block.get("text"), "text")
                elif kind == "thinking":
                    reasoning += self._thought(block)
                elif kind != "redacted_thinking":
                    raise unsupported(kind, "type", _ASSISTANT_BLOCKS)
            except InvalidRequestError as error:
                error.within("content", content, block)
                raise
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        self._messages.append(message)

    def _call(self, block: dict[str, Any]) -> dict[str, Any]:
        call_id = read_text(block.get("id"), "id")
        name = read_text(block.get("name"), "name")
        arguments = arguments_text(read_object(block.get("input", {}), "input"))
        self._calls.add(call_id)
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _thought(self, block: dict[str, Any]) -> str:
        visible = read_text(block.get("thinking"), "thinking")
        sealed = opened(block.get("signature")) if self._opens_seals else None
        return visible if sealed is None else sealed


def _system_text(system: Any, field: str) -> str:
    if isinstance(system, str):
        return system
    texts: list[str] = []
    for index, block in enumerate(read_objects(system, field)):
        if block.get("type") != "text":
            raise unsupported(block.get("type"), (field, index, "type"), "system blocks are text")
        text = read_text(block.get("text"), (field, index, "text"))
        if not text.startswith(_ATTRIBUTION):
            texts.append(text)
    return "".join(texts)


def _result_text(content: Any, images: list[dict[str, Any]]) -> str:
    """The text of a tool result; its images are put behind ``images``."""
    if content is None:
        return ""
    texts: list[str] = []
    for block in read_objects(content, "content"):
        try:
            part = _user_part(block)
        except InvalidRequestError as error:
            error.within("content", content, block)
            raise
        if part["type"] == "text":
            texts.append(part["text"])
        else:
            images.append(part)
    return "\n".join(texts)


def _user_part(block: dict[str, Any]) -> dict[str, Any]:
    kind = block.get("type")
    if kind == "text":
        return text_part(read_text(block.get("text"), "text"))
    source = block.get("source")
    if kind == "image":
        return _image(read_object(source, "source"))
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        return text_part(read_text(source.get("data"), "source.data"))
    raise unsupported(kind, "type", _USER_BLOCKS)


def _image(source: dict[str, Any]) -> dict[str, Any]:
    kind = source.get("type")
    if kind == "url":
        return image_part(read_text(source.get("url"), "source.url"))
    if kind == "base64":
        media = read_text(source.get("media_type"), "source.media_type")
        content = read_text(source.get("data"), "source.data")
        return image_part(f"data:{media};base64,{content}")
    raise unsupported(kind, "source.type", "images are of type base64 or url")


def _read_tools(body: Mapping[str, Any], request: ChatRequest) -> None:
    offered = read_list(body["tools"], "tools") if body.get("tools") is not None else []
    functions: list[dict[str, Any]] = []
    for index, item in enumerate(offered):
        tool = read_object(item, ("tools", index))
        if tool.get("type") not in (None, "custom"):
            request.left_out.append("tool " + read_text(tool["type"], ("tools", index, "type")))
            continue
        name = read_text(tool.get("name"), ("tools", index, "name"))
        function: dict[str, Any] = {"name": name}
        if tool.get("description") is not None:
            function["description"] = read_text(tool["description"], ("tools", index, "description"))
        function["parameters"] = read_object(tool.get("input_schema"), ("tools", index, "input_schema"))
        if tool.get("strict") is not None:
            function["strict"] = read_flag(tool["strict"], ("tools", index, "strict"))
        functions.append({"type": "function", "function": function})
        request.tools[name] = ClientTool(name)
    if offered and not functions:
        raise InvalidRequestError("tools", "only tools with an input_schema can be called, and there is none")
    if functions:
        request.body["tools"] = functions
    if body.get("tool_choice") is not None:
        _read_choice(read_object(body["tool_choice"], "tool_choice"), request)


def _read_choice(choice: dict[str, Any], request: ChatRequest) -> None:
    chat = request.body
    kind = choice.get("type")
    if kind == "tool":
        name = read_text(choice.get("name"), "tool_choice.name")
        if name not in request.tools:
            raise InvalidRequestError("tool_choice.name", f"no tool has the name {shown(name)}")
        chat["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif not isinstance(kind, str) or kind not in _CHOICES:
        raise unsupported(kind, "tool_choice.type", "types are auto, any, tool and none")
    elif request.tools:
        chat["tool_choice"] = _CHOICES[kind]
    if choice.get("disable_parallel_tool_use") is not None and request.tools:
        field = "tool_choice.disable_parallel_tool_use"
        chat["parallel_tool_calls"] = not read_flag(choice["disable_parallel_tool_use"], field)


def _read_limits(body: Mapping[str, Any], chat: dict[str, Any], options: TranslationOptions) -> None:
    if body.get("max_tokens") is not None:
        chat["max_tokens"] = capped(read_count(body["max_tokens"], "max_tokens"), options.max_tokens)
    for name in ("temperature", "top_p"):
        if body.get(name) is not None:
            chat[name] = read_number(body[name], name)
    if body.get("top_k") is not None:
        chat["top_k"] = read_integer(body["top_k"], "top_k")
    if body.get("stop_sequences") is not None and (stops := read_texts(body["stop_sequences"], "stop_sequences")):
        chat["stop"] = stops


def _read_output(body: Mapping[str, Any], chat: dict[str, Any]) -> None:
    if body.get("thinking") is not None and read_object(body["thinking"], "thinking").get("type") == "disabled":
        chat["chat_template_kwargs"] = {"enable_thinking": False}
    config = read_object(body["output_config"], "output_config") if body.get("output_config") is not None else {}
    if config.get("format") is None:
        return
    output = read_object(config["format"], "output_config.format")
    if output.get("type") != "json_schema":
        raise unsupported(output.get("type"), "output_config.format.type", "the type is json_schema")
    schema = read_object(output.get("schema"), "output_config.format.schema")
    chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
