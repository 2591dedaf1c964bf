"""Puts assistant messages of a client's history back as the policy wrote them.

Harnesses rebuild the arguments of tool calls, strip text and drop reasoning, and each of that makes another prompt.
A message is found by the ids of its tool calls among the stored calls of its rollout, and is replaced only if it
says the same.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from token_id_capture.protocols import RemembersAnswers, TokenSink, offers
from token_id_capture.provenance import StoredAnswer
from token_id_capture.server.continuity.canonical import UnreadableHistoryError, call_ids, same_answer, same_reasoning
from token_id_capture.server.dialects.chat import History, reasoning_of

_MOST_BYTES: Final = 64 * 2**20

_Ids: TypeAlias = tuple[str, ...]
_Message: TypeAlias = dict[str, Any]


@dataclass
class _Rollout:
    """What is known of a rollout: its answers by their call ids, the newest last, and how far it was read."""

    order: int = 0
    size: int = 0
    answers: dict[_Ids, list[Mapping[str, Any]]] = field(default_factory=dict)


class AnswerMemory:
    """The answers with tool calls of the rollouts that were served last.

    Each stored call is read once by each process; ``most_bytes`` bounds what all rollouts together hold.
    """

    def __init__(self, source: RemembersAnswers, most_bytes: int = _MOST_BYTES) -> None:
        self._source = source
        self._most_bytes = most_bytes
        self._rollouts: OrderedDict[str, _Rollout] = OrderedDict()
        self._size = 0

    async def restore(self, rollout_id: str, messages: Sequence[_Message], history: History) -> int:
        """Replace what was rewritten in ``messages``; returns how many of them were changed."""
        asked = [(message, ids) for message in messages if (ids := _call_ids(message))]
        if not asked or history is History.OFF:
            return 0
        known = self._rollouts.setdefault(rollout_id, _Rollout())
        self._rollouts.move_to_end(rollout_id)
        if any(ids not in known.answers for _, ids in asked):
            self._take(known, await self._source.answers_since(rollout_id, known.order))
        return sum(_restored(message, known.answers.get(ids, ()), history) for message, ids in asked)

    def _take(self, known: _Rollout, stored: Sequence[StoredAnswer]) -> None:
        before = known.size
        for answer in stored:
            if answer.order <= known.order:
                continue  # another request of the rollout has read it meanwhile
            known.order = answer.order
            if ids := _call_ids(answer.message):
                known.answers.setdefault(ids, []).append(answer.message)
                known.size += _size_of(answer.message)
        self._size += known.size - before
        while self._size > self._most_bytes and len(self._rollouts) > 1:
            _, oldest = self._rollouts.popitem(last=False)
            self._size -= oldest.size


def answer_memory(sink: TokenSink | None) -> AnswerMemory | None:
    """The memory of a sink's rollouts; None if the sink cannot be asked."""
    return AnswerMemory(sink) if offers(sink, RemembersAnswers) else None


def _restored(message: _Message, answers: Sequence[Mapping[str, Any]], history: History) -> bool:
    """Write a message as it was generated; returns whether that changed it."""
    answer = next((answer for answer in reversed(answers) if same_answer(answer, message)), None)
    if answer is None:
        return False
    before = dict(message)
    message["content"] = answer.get("content") or None
    message["tool_calls"] = list(map(_call_as_generated, message["tool_calls"], answer["tool_calls"]))
    said = reasoning_of(answer)
    # Thoughts of white space alone equal those of a client that dropped them, so what it sent is asked first.
    restated = same_reasoning(answer, message) if reasoning_of(message) else history is History.FULL
    if said and restated:
        message.pop("reasoning", None)
        message["reasoning_content"] = said
    return message != before


def _call_as_generated(sent: Mapping[str, Any], generated: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(sent["function"])
    if isinstance(arguments := generated["function"].get("arguments"), str):
        function["arguments"] = arguments
    return {**sent, "function": function}


def _call_ids(message: Mapping[str, Any]) -> _Ids:
    """The ids of a message's tool calls; empty if it has none, or one has no id."""
    try:
        ids = call_ids(message) if message.get("role") == "assistant" else ()
    except UnreadableHistoryError:
        return ()
    return ids if all(ids) else ()


def _size_of(message: Mapping[str, Any]) -> int:
    functions = [call.get("function") for call in message["tool_calls"]]
    texts = [message.get("content"), reasoning_of(message)]
    texts += [function.get("arguments") for function in functions if isinstance(function, Mapping)]
    return 512 + sum(sys.getsizeof(text) for text in texts)
