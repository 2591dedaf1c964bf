"""Recognises by its content which captured call a request continues.

A chain of hashes runs over the messages of a conversation::

    h0 = H(version, model, template arguments, tools)        h_i = H(h_(i-1), message_i)

Each captured choice is remembered under the chain after its answer. A later request restates that
answer among its messages, so the chain after that message is the same, whichever process captured
the call. Harnesses do not restate an answer byte for byte: they rebuild the arguments of a tool
call, strip white space, or leave the reasoning out. What a harness may change without meaning
another history is made equal before it is hashed:

=====================================================  ===============================================
compared                                               not compared, or made equal
=====================================================  ===============================================
model, template arguments and tools, as JSON           the order of keys, ``cache_control``
order, roles and names of messages                     unknown fields of a message
user, system and tool text, exactly                    whether a text is a string or a list of parts
the answer's text, without white space around it       null, empty and missing content
tool calls: name, and arguments as JSON values         how arguments are written, and the ids of calls
=====================================================  ===============================================

Reasoning stays out of the chain, because most harnesses drop it. Its digest and that of the call
ids are kept beside the chain instead.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

import orjson

from token_id_capture.server.dialects.chat import reasoning_of

VERSION: Final = 1
"""Part of every chain: a chain of another version never matches."""

CHAIN_BYTES: Final = 16
DIGEST_BYTES: Final = 8

_TEMPLATE_ARGUMENTS: Final = ("chat_template_kwargs", "reasoning_effort")
_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text", "refusal"})


class NotTextError(Exception):
    """A message holds something other than text, so its tokens are not the template's alone."""


class UnreadableHistoryError(Exception):
    """The messages do not have the shape of a chat, which is for the engine to refuse."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An assistant message of a conversation, as the index knows it.

    ``position`` is its place among the messages. ``chain`` is the hash after it. ``reasoning`` and
    ``call_ids`` are digests of its reasoning and of the ids of its tool calls; empty if it has none.
    """

    position: int
    chain: bytes
    reasoning: bytes
    call_ids: bytes


@dataclass(frozen=True, slots=True)
class History:
    """The messages of one request; ``answers`` are those of the assistant, in order.

    ``start`` is the chain before the first message, which names the model, template arguments and tools.
    """

    start: bytes
    answers: tuple[Answer, ...]
    length: int
    chain: bytes
    ends_with_answer: bool

    def answered(self, message: Mapping[str, Any]) -> Answer:
        """A captured answer to this request.

        Raises:
            NotTextError, UnreadableHistoryError: it cannot be compared with a message that restates it.
        """
        return Answer(self.length, _next(self.chain, _packed_answer(message)), *_digests(message))


def read_history(body: Mapping[str, Any], begun: Iterable[History] = ()) -> History:
    """Read the conversation of a chat request. ``begun`` are histories with whose messages its own begin.

    Raises:
        NotTextError: a message holds something other than text.
        UnreadableHistoryError: ``messages`` is not a list of messages.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise UnreadableHistoryError("messages is not a list of messages")
    start = _start(body)
    none = History(start, (), 0, start, ends_with_answer=False)
    known = max((one for one in begun if one.start == start), key=lambda one: one.length, default=none)
    answers, chain, role = [*known.answers], known.chain, "assistant" if known.ends_with_answer else ""
    last_ids = call_ids(messages[answers[-1].position]) if answers else ()
    for position in range(known.length, len(messages)):
        message = messages[position]
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UnreadableHistoryError(f"messages[{position}] has no role")
        role = message["role"]
        if role == "assistant":
            chain = _next(chain, _packed_answer(message))
            answers.append(Answer(position, chain, *_digests(message)))
            last_ids = call_ids(message)
        else:
            chain = _next(chain, _packed_other(message, last_ids))
    return History(start, tuple(answers), len(messages), chain, role == "assistant")


def same_answer(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two assistant messages say the same, apart from what a harness may rewrite; reasoning is not compared."""
    try:
        return _packed_answer(one) == _packed_answer(other)
    except (NotTextError, UnreadableHistoryError):
        return False


def same_reasoning(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two assistant messages hold the same thoughts, white space around them aside."""
    return reasoning_of(one).strip() == reasoning_of(other).strip()


def call_ids(message: Mapping[str, Any]) -> tuple[str, ...]:
    """The ids of a message's tool calls, in order; empty text for a call without one.

    Raises:
        UnreadableHistoryError: its tool calls are not a list.
    """
    return tuple(map(_call_id, _tool_calls(message)))


def _start(body: Mapping[str, Any]) -> bytes:
    tools = body.get("tools")
    shown = [_without_cache_control(tool) for tool in tools] if isinstance(tools, list) else []
    arguments = [body.get(name) for name in _TEMPLATE_ARGUMENTS]
    return _next(b"", _json([VERSION, body.get("model"), arguments, shown]))


def _without_cache_control(tool: Any) -> Any:
    if isinstance(tool, Mapping) and "cache_control" in tool:
        return {key: value for key, value in tool.items() if key != "cache_control"}
    return tool


def _next(chain: bytes, packed: bytes) -> bytes:
    return blake2b(chain + packed, digest_size=CHAIN_BYTES).digest()


def _packed_answer(message: Mapping[str, Any]) -> bytes:
    calls = [_comparable_call(call) for call in _tool_calls(message)]
    return _json(["assistant", text_of(message.get("content")).strip(), calls])


def _packed_other(message: Mapping[str, Any], ids: Sequence[str]) -> bytes:
    """A message that no policy wrote. A tool's result names its call by the call's place, not by its id."""
    role, result_of = message["role"], message.get("tool_call_id")
    place = ids.index(result_of) if result_of in ids else None
    return _json([role, message.get("name"), place, text_of(message.get("content"))])


def _comparable_call(call: Any) -> list[Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise UnreadableHistoryError("a tool call names no function")
    return [function.get("name"), _comparable_arguments(function.get("arguments"))]


def _comparable_arguments(arguments: Any) -> Any:
    """Arguments as the JSON value that they write; text that is not JSON stays text, and is told from a value."""
    if arguments is None or arguments == "":
        return [{}]
    if not isinstance(arguments, str):
        return [_comparable(arguments)]
    try:
        return [_comparable(orjson.loads(arguments))]
    except (orjson.JSONDecodeError, RecursionError):
        return arguments


def _comparable(value: Any) -> Any:
    """A JSON value whose numbers are doubles, because clients that know no integers write 10000.0 as 10000."""
    if isinstance(value, Mapping):
        return {key: _comparable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_comparable(item) for item in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    try:
        number = float(value)
    except OverflowError:
        return {"integer": str(value)}
    return number if math.isfinite(number) else {"number": str(number)}


def text_of(content: Any) -> str:
    """The text of a message's content: a string, a list of text parts, or nothing.

    Raises:
        NotTextError: there is something other than text in it.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise NotTextError("the content is neither a text nor a list of parts")
    return "".join(map(_text_of_part, content))


def _text_of_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    text = part.get("text", part.get("refusal")) if kind in _TEXT_PARTS else None
    if not isinstance(text, str):
        raise NotTextError(f"a part of type {kind!r}")
    return text


def _tool_calls(message: Mapping[str, Any]) -> Iterable[Any]:
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise UnreadableHistoryError("tool_calls is not a list")
    return calls or ()


def _call_id(call: Any) -> str:
    found = call.get("id") if isinstance(call, Mapping) else None
    return found if isinstance(found, str) else ""


def _digests(message: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """Digests of an answer's reasoning and of the ids of its tool calls."""
    reasoning, ids = reasoning_of(message).strip(), call_ids(message)
    return _digest(_json(reasoning)) if reasoning else b"", _digest(_json(ids)) if any(ids) else b""


def _digest(packed: bytes) -> bytes:
    return blake2b(packed, digest_size=DIGEST_BYTES).digest()


def _json(value: Any) -> bytes:
    """One spelling of a JSON value; text that UTF-8 cannot carry, and huge integers, need the slower library."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        return json.dumps(value, sort_keys=True).encode()
