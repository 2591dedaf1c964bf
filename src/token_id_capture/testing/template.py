"""The vocabulary and the chat template of the test policy.

A token is a byte (0 to 255) or one of a few marks. A chat becomes one flat sequence of turns::

    BEGIN_OF_TURN  role  bytes of the text  END_OF_TURN

and a tool call inside an assistant turn is ``TOOL_CALL name ARGUMENTS arguments END_OF_CALL``. By
default the template only ever appends: if an assistant message comes back as it was produced, the
prompt of the next call starts with the previous prompt and the tokens that were generated. ``Habits``
make it do what published templates do to a history. Text can never become a mark, because marks are
no bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

BEGIN_OF_TURN: Final = 256
END_OF_TURN: Final = 257
SYSTEM: Final = 258
USER: Final = 259
ASSISTANT: Final = 260
TOOL: Final = 261
TOOLS: Final = 262
"""Opens the turn that defines the tools, as JSON."""
TOOL_CALL: Final = 263
ARGUMENTS: Final = 264
END_OF_CALL: Final = 265
THINK: Final = 266
END_OF_THOUGHT: Final = 267
DOUBLE_SPACE: Final = 268
"""Two spaces as one token, which only a template that cuts otherwise writes."""
VOCABULARY_SIZE: Final = 269

_ROLES: Final = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}
_MARK_TEXTS: Final = {
    BEGIN_OF_TURN: "<|begin|>",
    END_OF_TURN: "<|end|>",
    SYSTEM: "<|system|>",
    USER: "<|user|>",
    ASSISTANT: "<|assistant|>",
    TOOL: "<|tool|>",
    TOOLS: "<|tools|>",
    TOOL_CALL: "<tool_call>",
    ARGUMENTS: "<arguments>",
    END_OF_CALL: "</tool_call>",
    THINK: "<think>",
    END_OF_THOUGHT: "</think>",
    DOUBLE_SPACE: "  ",
}

# The rule of the OpenAI API. ASCII also means that a name that was cut off by a limit is still text.
_TOOL_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True)
class Habits:
    """How a template treats a history. By default its prompts only ever grow.

    With ``reasoning`` each answer begins with a thought, ``THINK text END_OF_THOUGHT``, whose first mark
    the prompt writes. ``keeps_reasoning`` shows the thoughts of earlier answers; without it they are
    dropped. ``tidies`` strips the text of earlier answers and writes the arguments of calls anew. ``merges``
    cuts the same text into other tokens than the policy does.
    """

    reasoning: bool = False
    keeps_reasoning: bool = False
    tidies: bool = False
    merges: bool = False


APPENDING: Final = Habits()


def encode(text: str) -> list[int]:
    """The tokens of a text: its UTF-8 bytes."""
    # An escaped lone surrogate is valid JSON, so a client can send one; UTF-8 has no bytes for it.
    return list(text.encode("utf-8", "replace"))


def decode(token_ids: Iterable[int], *, marks: bool = False) -> str:
    """The text of the bytes among these tokens; with ``marks`` also what each mark is written as."""
    if marks:
        pieces = (_MARK_TEXTS[token].encode() if token >= 256 else bytes((token,)) for token in token_ids)
        return b"".join(pieces).decode("utf-8", "replace")
    spaced = (b"  " if token == DOUBLE_SPACE else bytes((token,)) for token in token_ids if not _is_mark(token))
    return b"".join(spaced).decode("utf-8", "replace")


def _is_mark(token: int) -> bool:
    return token >= 256 and token != DOUBLE_SPACE


def token_text(token: int) -> str:
    """What one token looks like on its own; a byte that is not a character of its own is empty."""
    if token >= 256:
        return _MARK_TEXTS[token]
    return chr(token) if token < 128 else ""


def render_chat(
    messages: Sequence[Any],
    tools: Sequence[Any] | None = None,
    *,
    generation: bool = True,
    habits: Habits = APPENDING,
) -> list[int]:
    """The prompt of a chat request, with ``generation`` up to where the assistant speaks.

    Raises:
        ValueError: a message or tool is malformed; the message says which.
    """
    prompt: list[int] = []
    if tools:
        _check_tools(tools)
        prompt += [BEGIN_OF_TURN, TOOLS, *encode(json.dumps(tools, separators=(",", ":"))), END_OF_TURN]
    for position, message in enumerate(messages):
        role = _ROLES.get(str(message.get("role"))) if isinstance(message, Mapping) else None
        if role is None:
            raise ValueError(f"messages[{position}] must be an object with a role out of {', '.join(_ROLES)}")
        prompt += [BEGIN_OF_TURN, role]
        prompt += _render_message(message, position, habits if role == ASSISTANT else APPENDING)
        prompt.append(END_OF_TURN)
    opening = [BEGIN_OF_TURN, ASSISTANT, *((THINK,) if habits.reasoning else ())]
    return [*prompt, *opening] if generation else prompt


def _render_message(message: Mapping[str, Any], position: int, habits: Habits) -> list[int]:
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    thought = [THINK, *encode(str(reasoning)), END_OF_THOUGHT] if reasoning and habits.keeps_reasoning else []
    text = _content_text(message.get("content"), position)
    calls = [_render_call(call, position, habits) for call in message.get("tool_calls") or ()]
    said = encode(text.strip() if habits.tidies else text)
    return [*thought, *(_merged(said) if habits.merges else said), *(token for call in calls for token in call)]


def _merged(tokens: Sequence[int]) -> list[int]:
    merged: list[int] = []
    for token in tokens:
        if token == 32 and merged[-1:] == [32]:
            merged[-1] = DOUBLE_SPACE
        else:
            merged.append(token)
    return merged


def _check_tools(tools: Sequence[Any]) -> None:
    for position, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
            raise ValueError(f"tools[{position}].function.name must match {_TOOL_NAME.pattern}, got {name!r}")


def _content_text(content: Any, position: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, Mapping) and "text" in part for part in content):
        return "".join(str(part["text"]) for part in content)
    raise ValueError(f"messages[{position}].content must be a text or a list of text parts")


def _render_call(call: Any, position: int, habits: Habits) -> list[int]:
    try:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
    except (TypeError, KeyError) as error:
        raise ValueError(f"messages[{position}].tool_calls need function.name and function.arguments") from error
    written = _tidied(str(arguments)) if habits.tidies else str(arguments)
    return [TOOL_CALL, *encode(str(name)), ARGUMENTS, *encode(written), END_OF_CALL]


def _tidied(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments))
    except ValueError:
        return arguments


class TurnReader:
    """Reads the tokens of an assistant turn one by one into a chat message.

    A call that was cut off by a limit is reported as far as it came, so that the turn, rendered
    again, still starts with exactly the tokens that were generated.
    """

    def __init__(self, *, call_ids: Iterable[str], thinking: bool = False) -> None:
        """``thinking`` says that the prompt began a thought."""
        self._call_ids = iter(call_ids)
        self._thinking = thinking
        self._thoughts: list[str] = []
        self._name: list[int] | None = None
        self._texts: list[str] = []
        self._arguments: list[list[str]] = []
        self._headers: list[dict[str, Any]] = []

    def feed(self, token: int) -> dict[str, Any]:
        """What a stream adds to the message for this token: a ``delta``, often an empty one."""
        if self._thinking:
            return self._think(token)
        if token == TOOL_CALL:
            self._name = []
        elif token == ARGUMENTS:
            return self._open_call()
        elif token < 256 and self._name is not None:
            self._name.append(token)
        elif token < 256 and self._headers:
            self._arguments[-1].append(token_text(token))
            call = {"index": len(self._headers) - 1, "function": {"arguments": token_text(token)}}
            return {"content": None, "tool_calls": [call]}
        elif token < 256:
            self._texts.append(token_text(token))
            return {"content": token_text(token)}
        return {}

    def finish(self) -> dict[str, Any]:
        """The delta for a call whose name was cut off, else an empty one."""
        return {} if self._name is None else self._open_call()

    def _think(self, token: int) -> dict[str, Any]:
        if token >= 256:
            self._thinking = False
            return {}
        self._thoughts.append(token_text(token))
        return {"reasoning": token_text(token)}

    def _open_call(self) -> dict[str, Any]:
        header = {"id": next(self._call_ids), "type": "function", "function": {"name": decode(self._name or ())}}
        self._name = None
        self._headers.append(header)
        self._arguments.append([])
        index = len(self._headers) - 1
        call = {"id": header["id"], "type": "function", "index": index, "function": header["function"]}
        return {"content": None, "tool_calls": [call]}

    @property
    def reasoning(self) -> str | None:
        """The thought of the turn so far."""
        return "".join(self._thoughts) or None

    @property
    def content(self) -> str:
        """The text of the turn so far."""
        return "".join(self._texts)

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls of the turn so far, as a complete message has them."""
        return [
            {**header, "function": {**header["function"], "arguments": "".join(arguments)}}
            for header, arguments in zip(self._headers, self._arguments, strict=True)
        ]
