"""The tools of a Responses request as functions, and how their names find back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from token_id_capture.builder.content import CUSTOM_INPUT, function_name
from token_id_capture.server.dialects.chat import ChatRequest, ClientTool
from token_id_capture.server.dialects.fields import (
    InvalidRequestError,
    Place,
    read_flag,
    read_list,
    read_object,
    read_text,
    shown,
)

# Tools that OpenAI's servers run themselves. Codex offers web_search in every request, so refusing is not an option.
_HOSTED: Final = frozenset({"web_search", "web_search_preview", "image_generation", "file_search", "tool_search"}) | {
    "code_interpreter",
    "mcp",
    "computer_use_preview",
    "local_shell",
}


def read_tools(body: Mapping[str, Any], request: ChatRequest) -> list[dict[str, Any]]:
    """The functions for the engine. ``request`` learns their names, and what was left out."""
    offered = read_list(body["tools"], "tools") if body.get("tools") is not None else []
    functions: list[dict[str, Any]] = []
    for index, item in enumerate(offered):
        tool = read_object(item, ("tools", index))
        if tool.get("type") == "namespace":
            namespace = read_text(tool.get("name"), ("tools", index, "name"))
            field = ("tools", index, "tools")
            for position, inner in enumerate(read_list(tool.get("tools"), field)):
                place = (field, position)
                _read_tool(read_object(inner, place), place, namespace, request, functions)
        else:
            _read_tool(tool, ("tools", index), None, request, functions)
    return functions


def _read_tool(
    tool: dict[str, Any], field: Place, namespace: str | None, request: ChatRequest, functions: list[dict[str, Any]]
) -> None:
    kind = read_text(tool.get("type"), (field, "type"))
    if kind in _HOSTED or kind.startswith(("web_search_", "computer_use_")):
        request.left_out.append(f"tool {kind}")
        return
    if kind not in ("function", "custom"):
        raise InvalidRequestError(
            (field, "type"), f"a tool of type {shown(kind)} cannot be offered in a chat completion"
        )
    name = read_text(tool.get("name"), (field, "name"))
    described: dict[str, Any] = {"name": function_name(name, namespace)}
    request.tools[described["name"]] = ClientTool(name, namespace, custom=kind == "custom")
    if tool.get("description") is not None:
        described["description"] = read_text(tool["description"], (field, "description"))
    if kind == "custom":
        _describe_custom(tool, field, described)
    else:
        parameters = tool.get("parameters")
        described["parameters"] = {} if parameters is None else read_object(parameters, (field, "parameters"))
        if tool.get("strict") is not None:
            described["strict"] = read_flag(tool["strict"], (field, "strict"))
    functions.append({"type": "function", "function": described})


def _describe_custom(tool: dict[str, Any], field: Place, described: dict[str, Any]) -> None:
    """A custom tool takes a text, mostly in a grammar; chat functions take JSON, so the grammar is described."""
    output = read_object(tool["format"], (field, "format")) if tool.get("format") is not None else {}
    if output.get("definition") is not None:
        grammar = read_text(output["definition"], (field, "format", "definition"))
        described["description"] = "\n\n".join(filter(None, (described.get("description"), grammar)))
    described["parameters"] = {
        "type": "object",
        "properties": {CUSTOM_INPUT: {"type": "string"}},
        "required": [CUSTOM_INPUT],
    }


def read_tool_choice(body: Mapping[str, Any], request: ChatRequest) -> None:
    """``tool_choice`` and ``parallel_tool_calls``, where a tool is offered."""
    chat, choice = request.body, body.get("tool_choice")
    parallel = body.get("parallel_tool_calls")
    if parallel is not None and read_flag(parallel, "parallel_tool_calls") is not None and request.tools:
        chat["parallel_tool_calls"] = parallel
    if choice is None:
        return
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise InvalidRequestError("tool_choice", f"{shown(choice)} is unknown; choices are auto, none and required")
        if request.tools:
            chat["tool_choice"] = choice
        return
    named = read_object(choice, "tool_choice")
    if named.get("type") not in ("function", "custom"):
        request.left_out.append(f"tool_choice {read_text(named.get('type'), 'tool_choice.type')}")
        return
    name = read_text(named.get("name"), "tool_choice.name")
    known = [function for function, tool in request.tools.items() if tool.name == name]
    if not known:
        raise InvalidRequestError("tool_choice.name", f"no tool has the name {shown(name)}")
    chat["tool_choice"] = {"type": "function", "function": {"name": known[0]}}


def custom_input(arguments: str) -> str:
    """The text for a custom tool: the string of the JSON argument, or the raw text if that is none."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    text = value.get(CUSTOM_INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
