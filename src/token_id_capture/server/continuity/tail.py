"""What a chat template writes after an answer, found without knowing the template.

A request restates an answer whose exact tokens K (prompt and generation) are known. Its prompt is to
be K and then the template's own text from the end of that answer on: the tail T. Templates are
programs, so nothing is parsed. The engine renders short conversations in which stand-ins take the
answer's place, and T is read off what their renderings have in common:

1. Render the system message, a user's word, a stand-in, and the messages after the real answer, for
   two stand-ins: of the real answer's shape, with "a" or "b" for each text and argument.
2. Their common end E is what the template writes after an answer in this context.
3. A policy that ended its turn wrote the end-of-turn token e itself. T begins behind e, which has to
   be among the first tokens of E: no further than one behind A, the common end of the two stand-ins
   with nothing after them. An e in a later message's text lies beyond.
4. A policy that was cut off did not. T begins with what ends an answer of words. In either case what
   lies before T has to stay the same with other texts in the messages after the answer: some templates
   put the result of a tool before the words of the answer that called it.
5. The real request as the template renders it, F, has to end with T, and with e before it; else 1 is
   repeated with the real history before the stand-in.
6. Where F begins with K, the template's own prompt continues the call already.

No text of the model or the user is in a stand-in, so no token in it can look like the end of a turn.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from token_id_capture import reasons
from token_id_capture.server.continuity.canonical import text_of
from token_id_capture.tokens import TokenIds

Message: TypeAlias = Mapping[str, Any]
Render: TypeAlias = Callable[[Sequence[Message], bool], Awaitable[TokenIds]]
"""Renders messages as the engine would; the second argument asks for the start of the next answer behind them."""

_WORDS: Final = ("a", "b")
_PLAIN: Final[Message] = {"role": "assistant", "content": _WORDS[0]}
_SYSTEM_ROLES: Final = ("system", "developer")
_SHAPES_REMEMBERED: Final = 4096


class TailUnknownError(Exception):
    """No tail is certain; ``reason`` is one of ``reasons.CONTINUITY_REASONS``."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class RestatedAnswer:
    """An answer that a request restates at ``position`` of its ``messages``.

    ``known`` are the call's exact tokens, prompt and generation. ``ended`` says whether the policy ended
    its turn itself, so that the last of them is its end-of-turn token.
    """

    messages: Sequence[Message]
    position: int
    known: TokenIds
    ended: bool

    @property
    def message(self) -> Message:
        """The answer as the request restates it."""
        return self.messages[self.position]

    @property
    def following(self) -> Sequence[Message]:
        """The messages behind it."""
        return self.messages[self.position + 1 :]


@dataclass(frozen=True, slots=True)
class Continuation:
    """``whole`` is the request as the template renders it. ``tail`` follows the known tokens; it is None
    where ``whole`` begins with them already."""

    whole: TokenIds
    tail: TokenIds | None


class Endings:
    """What the template writes behind an answer that nothing follows, by the answer's shape; bounded."""

    def __init__(self) -> None:
        self._known: OrderedDict[Any, TokenIds] = OrderedDict()

    async def of(
        self, scope: bytes, context: Sequence[Message], stand_ins: Sequence[Message], render: Render
    ) -> TokenIds:
        """The ending of answers like these; ``scope`` names the model, its tools and template arguments."""
        key = scope, len(context), _shape(stand_ins[0])
        if key not in self._known:
            first, second = await asyncio.gather(*(render([*context, stand_in], False) for stand_in in stand_ins))
            self._known[key] = _common_end(first, second)
            if len(self._known) > _SHAPES_REMEMBERED:
                self._known.popitem(last=False)
        return self._known[key]


@dataclass(frozen=True, slots=True)
class _Tail:
    """``ids`` begin at ``start`` of what the template writes after the answer."""

    after: TokenIds
    start: int

    @property
    def ids(self) -> TokenIds:
        return self.after[self.start :]

    def ends(self, whole: TokenIds) -> bool:
        """Whether a prompt ends with it, and with the token before it."""
        seen = self.after[max(0, self.start - 1) :]
        return whole[max(0, len(whole) - len(seen)) :] == seen


async def continue_answer(answer: RestatedAnswer, scope: bytes, render: Render, endings: Endings) -> Continuation:
    """Find what follows the known tokens.

    Raises:
        TailUnknownError: the template's output leaves a doubt.
    """
    context = _short_context(answer.messages)
    whole, tail = await asyncio.gather(render(answer.messages, True), _tail(answer, context, scope, render, endings))
    if whole.startswith(answer.known):
        return Continuation(whole, None)
    if isinstance(tail, str) or not tail.ends(whole):
        tail = await _tail(answer, answer.messages[: answer.position], scope, render, endings)
    if isinstance(tail, str):
        raise TailUnknownError(tail)
    if not tail.ends(whole):
        raise TailUnknownError(reasons.TAIL_DIFFERS)
    return Continuation(whole, tail.ids)


async def _tail(
    answer: RestatedAnswer, context: Sequence[Message], scope: bytes, render: Render, endings: Endings
) -> _Tail | str:
    """The tail in this context, or the reason why it is not certain."""
    for words in (True,) if _has_words(answer.message) else (False, True):
        found = await _tail_after(answer, _stand_ins(answer.message, words), context, scope, render, endings)
        if found != reasons.TEMPLATE_IGNORES_ANSWER:
            break
    return found


async def _tail_after(
    answer: RestatedAnswer,
    stand_ins: Sequence[Message],
    context: Sequence[Message],
    scope: bytes,
    render: Render,
    endings: Endings,
) -> _Tail | str:
    following = answer.following
    short = _short_context(answer.messages)
    first, second, otherwise, ending = await asyncio.gather(
        *(render([*context, stand_in, *following], True) for stand_in in stand_ins),
        render([*context, stand_ins[0], *map(_reworded, following)], True),
        endings.of(scope, short, stand_ins, render),
    )
    if first == second:
        return reasons.TEMPLATE_IGNORES_ANSWER
    after = _common_end(first, second)
    if answer.ended:
        start = _behind_end_of_turn(after, ending, answer.known[-1])
    else:
        start = _at_end(after, ending, await endings.of(scope, short, _stand_ins(_PLAIN, True), render))
    if start is None:
        return reasons.STOP_TOKEN_UNKNOWN
    before = first[: len(first) - len(after) + start]
    return _Tail(after, start) if otherwise.startswith(before) else reasons.TAIL_DIFFERS


def _behind_end_of_turn(after: TokenIds, ending: TokenIds, end_of_turn: int) -> int | None:
    """Where the tail begins if the policy wrote ``end_of_turn`` itself."""
    near = after[: len(ending) + 1].tolist()
    return near.index(end_of_turn) + 1 if end_of_turn in near else None


def _at_end(after: TokenIds, ending: TokenIds, plain: TokenIds) -> int | None:
    """Where the tail begins if the policy did not end its turn: with the ending of an answer of words.

    Before it may be what closes a tool call, which a policy that was cut off did not write and that
    belongs to no answer of words.
    """
    closing = len(ending) - len(plain)
    if closing < 0 or ending[closing:] != plain or not after.startswith(ending[:closing]):
        return None
    return closing


def _short_context(messages: Sequence[Message]) -> list[Message]:
    system = [messages[0]] if messages[0].get("role") in _SYSTEM_ROLES else []
    return [*system, {"role": "user", "content": "u"}]


def _stand_ins(answer: Message, words: bool) -> list[Message]:
    """Two answers of this one's shape that have no word in common; ``words`` gives them a text."""
    return [_stand_in(answer, word, words) for word in _WORDS]


def _stand_in(answer: Message, word: str, words: bool) -> Message:
    calls = [
        {**call, "function": {**call["function"], "arguments": f'{{"{word}":"{word}"}}'}}
        for call in answer.get("tool_calls") or ()
    ]
    content = word if words else answer.get("content")
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


def _has_words(answer: Message) -> bool:
    return not answer.get("tool_calls") or bool(text_of(answer.get("content")).strip())


def _shape(stand_in: Message) -> tuple[Any, ...]:
    names = (call["function"].get("name") for call in stand_in.get("tool_calls") or ())
    return stand_in["content"] in _WORDS, *names


def _reworded(message: Message) -> Message:
    """The message with another text."""
    return {**message, "content": "v" if text_of(message.get("content")) == "u" else "u"}


def _common_end(first: TokenIds, second: TokenIds) -> TokenIds:
    """The longest end of both. Halving compares whole runs, which is faster than token by token."""
    shorter, longer = 0, min(len(first), len(second))
    while shorter < longer:
        middle = (shorter + longer + 1) // 2
        if first[len(first) - middle :] == second[len(second) - middle :]:
            shorter = middle
        else:
            longer = middle - 1
    return first[len(first) - shorter :]
