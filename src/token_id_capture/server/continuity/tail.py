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
5. The real request as the template renders it, F, has to end with T, and with e before it; else, and where the
   template writes no end of turn, 1 is repeated with the real history before the stand-in.
6. Where F begins with K, the template's own prompt continues the call already.
7. Once 2 to 4 found where T begins behind a stand-in, one rendering of it with other messages behind it will do,
   as long as it is the same up to there.

No text of the model or the user is in a stand-in, so no token in it can look like the end of a turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from token_id_capture import reasons
from token_id_capture.server.continuity.canonical import text_of
from token_id_capture.server.continuity.template import (
    WORDS,
    Message,
    Render,
    Tail,
    TemplateMemory,
    common_end,
    shape_of,
)
from token_id_capture.tokens import TokenIds

_PLAIN: Final[Message] = {"role": "assistant", "content": WORDS[0]}
_SYSTEM_ROLES: Final = ("system", "developer")


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


@dataclass(frozen=True, slots=True)
class _Search:
    """The search for one tail. ``memory`` knows what was found for the shapes of other answers."""

    answer: RestatedAnswer
    scope: bytes
    render: Render
    memory: TemplateMemory

    async def tail(self, context: Sequence[Message], *, remember: bool) -> Tail | str:
        """The tail in this context, or the reason why it is not certain."""
        for words in (True,) if _has_words(self.answer.message) else (False, True):
            stand_ins = _stand_ins(self.answer.message, words)
            known = await self._known(stand_ins[0], context) if remember else None
            found = known or await self._after(stand_ins, context, remember=remember)
            if found != reasons.TEMPLATE_IGNORES_ANSWER:
                break
        return found

    async def _known(self, stand_in: Message, context: Sequence[Message]) -> Tail | None:
        """By one rendering, if what is before the tail is known."""
        key = self._key(stand_in, context)
        start = self.memory.start(key)
        if start is None:
            return None
        found = start.tail(await self.render([*context, stand_in, *self.answer.following], True))
        if found is None:
            self.memory.give_up(key)
        return found

    async def _after(self, stand_ins: Sequence[Message], context: Sequence[Message], *, remember: bool) -> Tail | str:
        following = self.answer.following
        short = _short_context(self.answer.messages)
        first, second, otherwise, ending = await asyncio.gather(
            *(self.render([*context, stand_in, *following], True) for stand_in in stand_ins),
            self.render([*context, stand_ins[0], *map(_reworded, following)], True),
            self._ending(short, stand_ins),
        )
        if first == second:
            return reasons.TEMPLATE_IGNORES_ANSWER
        after = common_end(first, second)
        if self.answer.ended:
            start, anchored = _behind_end_of_turn(after, ending, self.answer.known[-1]), True
        else:
            plain = await self._ending(short, _stand_ins(_PLAIN, True))
            start, anchored = _at_end(after, ending, plain), bool(plain)
        if start is None:
            return reasons.STOP_TOKEN_UNKNOWN
        tail = Tail(first, len(first) - len(after) + start, min(1, start), anchored)
        if not otherwise.startswith(first[: tail.start]):
            return reasons.TAIL_DIFFERS
        if remember:
            self.memory.keep_start(self._key(stand_ins[0], context), tail)
        return tail

    async def _ending(self, context: Sequence[Message], stand_ins: Sequence[Message]) -> TokenIds:
        return await self.memory.ending(self.scope, context, stand_ins, self.render)

    def _key(self, stand_in: Message, context: Sequence[Message]) -> Any:
        ended_by = self.answer.known[-1] if self.answer.ended else None
        roles = tuple(message["role"] for message in self.answer.following)
        system = hash(text_of(context[0].get("content")))
        return self.scope, system, shape_of(stand_in), roles, ended_by


async def continue_answer(answer: RestatedAnswer, scope: bytes, render: Render, memory: TemplateMemory) -> Continuation:
    """Find what follows the known tokens.

    Raises:
        TailUnknownError: the template's output leaves a doubt.
    """
    search = _Search(answer, scope, render, memory)
    short = _short_context(answer.messages)
    whole, tail = await asyncio.gather(render(answer.messages, True), search.tail(short, remember=True))
    if whole.startswith(answer.known):
        return Continuation(whole, None)
    if isinstance(tail, str) or not tail.anchored or not tail.ends(whole):
        tail = await search.tail(answer.messages[: answer.position], remember=False)
    if isinstance(tail, str):
        raise TailUnknownError(tail)
    if not tail.ends(whole):
        raise TailUnknownError(reasons.TAIL_DIFFERS)
    return Continuation(whole, tail.ids)


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
    return [_stand_in(answer, word, words) for word in WORDS]


def _stand_in(answer: Message, word: str, words: bool) -> Message:
    calls = [
        {**call, "function": {**call["function"], "arguments": f'{{"{word}":"{word}"}}'}}
        for call in answer.get("tool_calls") or ()
    ]
    content = word if words else answer.get("content")
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


def _has_words(answer: Message) -> bool:
    return not answer.get("tool_calls") or bool(text_of(answer.get("content")).strip())


def _reworded(message: Message) -> Message:
    """The message with another text."""
    return {**message, "content": "v" if text_of(message.get("content")) == "u" else "u"}
