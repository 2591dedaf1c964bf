"""Chat completions as every dialect needs them: the request that is built, and what a response says."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import orjson

from token_id_capture.server.dialects.fields import InvalidRequestError


class Dialect(StrEnum):
    """An interface that is translated to chat completions."""

    MESSAGES = "messages"
    RESPONSES = "responses"
    GEMINI = "gemini"


class InlineSystem(StrEnum):
    """What becomes of a system message that stands behind other messages."""

    KEEP = "keep"
    """It stays in its place."""
    USER = "user"
    """It becomes a user message with the same text."""
    MERGE = "merge"
    """Its text is added to the first system message."""


class History(StrEnum):
    """How far an assistant message in a client's history is put back as the policy sampled it."""

    EXACT = "exact"
    """What a client rewrote is undone; what it dropped stays dropped."""
    FULL = "full"
    """Dropped reasoning is put back too."""
    OFF = "off"
    """The client's history is taken as it is."""


@dataclass(frozen=True, slots=True)
class TranslationOptions:
    """How requests are translated.

    ``model`` replaces the client's model name; None keeps it. ``max_tokens`` caps what a client asks for, in
    tokens; None means no cap.
    """

    model: str | None = None
    max_tokens: int | None = None
    inline_system: InlineSystem = InlineSystem.KEEP
    history: History = History.EXACT


@dataclass(slots=True)
class ChatRequest:
    """A client's request as a chat completion, and what its response has to repeat.

    ``left_out`` names what has no place in a chat completion. ``tools`` maps the name of each function that
    the engine knows to what the client calls it.
    """

    dialect: Dialect
    body: dict[str, Any]
    client_model: str
    streams: bool = False
    left_out: list[str] = field(default_factory=list)
    tools: dict[str, ClientTool] = field(default_factory=dict)
    shows_reasoning: bool = True
    seals_reasoning: bool = True
    echoed: dict[str, Any] = field(default_factory=dict)

    @property
    def has_inline_system(self) -> bool:
        """Whether a system message stands behind another message."""
        return any(message["role"] == "system" for message in self.body["messages"][1:])

    def encoded(self) -> bytes:
        """The body in JSON.

        Raises:
            InvalidRequestError: it is nested too deeply, or what its response has to repeat is.
        """
        try:
            orjson.dumps({"response": self.echoed})  # so deep it lies in an event
            return orjson.dumps(self.body)
        except orjson.JSONEncodeError as error:
            raise InvalidRequestError("", f"the request is nested too deeply ({error})") from error


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool as the client named it; ``custom`` tools take a text instead of JSON arguments."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(slots=True)
class ToolCall:
    """A function call that the engine generated; ``arguments`` is its text."""

    call_id: str
    name: str
    arguments: str


class Finish(StrEnum):
    """Why a generation ended, as engines say it."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens. ``cached`` are part of ``prompt``, and ``reasoning`` are part of ``completion``."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int = 0

    @classmethod
    def of(cls, usage: Any) -> Usage:
        """Read ``usage`` of a chat response; what is missing counts 0."""
        members = usage if isinstance(usage, Mapping) else {}
        return cls(
            _count(members, "prompt_tokens"),
            _count(members, "completion_tokens"),
            _count(members.get("prompt_tokens_details"), "cached_tokens"),
            _count(members.get("completion_tokens_details"), "reasoning_tokens"),
        )


@dataclass(frozen=True, slots=True)
class Ending:
    """How a generation ended. ``stop_string`` is the client's stop sequence that ended it, where the engine says so."""

    finish: Finish
    usage: Usage
    has_calls: bool
    stop_string: str | None = None

    @property
    def is_aborted(self) -> bool:
        """Whether the engine gave up, so that nobody may act on what there is."""
        return self.finish is Finish.ABORT


@dataclass(slots=True)
class Generation:
    """A whole chat response."""

    reasoning: str
    text: str
    calls: list[ToolCall]
    ending: Ending


def read_generation(response: Mapping[str, Any], shown_id: str) -> Generation | None:
    """What the first choice of a chat response says; None if there is none, or no message in it.

    ``shown_id`` makes ids for calls that have none.
    """
    choices = response.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], Mapping) else {}
    message = choice.get("message")
    if not isinstance(message, Mapping):
        return None
    raw_calls = message.get("tool_calls")
    calls = [
        tool_call(call, index, shown_id)
        for index, call in enumerate(raw_calls if isinstance(raw_calls, list) else [])
        if isinstance(call, Mapping)
    ]
    ending = Ending(
        read_finish(choice.get("finish_reason")),
        Usage.of(response.get("usage")),
        bool(calls),
        stop_string_of(choice),
    )
    return Generation(reasoning_of(message), _text(message.get("content")), calls, ending)


def tool_call(call: Mapping[str, Any], index: int, shown_id: str) -> ToolCall:
    """One member of ``tool_calls``."""
    function = call.get("function")
    function = function if isinstance(function, Mapping) else {}
    call_id = _text(call.get("id")) or made_call_id(shown_id, index)
    return ToolCall(call_id, _text(function.get("name")), _text(function.get("arguments")))


def made_call_id(shown_id: str, index: int) -> str:
    """The id of a call to which the engine gave none."""
    return f"call_{shown_id}_{index}"


def reasoning_of(holder: Mapping[str, Any]) -> str:
    """The reasoning of a message or a delta, which engines name in two ways."""
    return _text(holder.get("reasoning_content")) or _text(holder.get("reasoning"))


def read_finish(value: Any) -> Finish:
    """The reason why a choice ended; one that is unknown counts as a stop."""
    try:
        return Finish(value)
    except ValueError:
        return Finish.STOP


def stop_string_of(choice: Mapping[str, Any]) -> str | None:
    """vLLM says in ``stop_reason`` which stop string ended the choice; a number there is a token."""
    stopped = choice.get("stop_reason")
    return stopped if isinstance(stopped, str) else None


def _json_writer() -> Callable[[Any], str]:
    """JSON with spaces. ``JSONEncoder`` makes its writer in C anew for each value, which takes three times as long."""
    encoder = json.JSONEncoder(ensure_ascii=False, check_circular=False)
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return encoder.encode
    separators = encoder.key_separator, encoder.item_separator
    write = make(None, encoder.default, json.encoder.encode_basestring, None, *separators, False, False, True)
    return lambda value: "".join(write(value, 0))


arguments_text: Final = _json_writer()
"""Arguments as a policy writes them: JSON with spaces, and characters as they are."""


def arguments_object(text: str) -> dict[str, Any]:
    """The object that arguments spell; empty if they spell none, as the dialects have no place for another value."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


_INLINE_SEPARATOR: Final = "\n\n"


def place_system_messages(messages: list[dict[str, Any]], mode: InlineSystem) -> list[dict[str, Any]]:
    """Treat the system messages that stand behind other messages as ``mode`` says."""
    if mode is InlineSystem.KEEP or all(message["role"] != "system" for message in messages[1:]):
        return messages
    if mode is InlineSystem.USER:
        return [
            {**message, "role": "user"} if position and message["role"] == "system" else message
            for position, message in enumerate(messages)
        ]
    texts = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": _INLINE_SEPARATOR.join(texts)}, *others]


def capped(asked: int, cap: int | None) -> int:
    """What a client asks for, at most ``cap``."""
    return asked if cap is None else min(asked, cap)


def _count(holder: Any, name: str) -> int:
    value = holder.get(name) if isinstance(holder, Mapping) else None
    return value if type(value) is int else 0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
