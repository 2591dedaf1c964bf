"""Which of the stored calls a request continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from token_id_capture import reasons
from token_id_capture.protocols import RemembersHistories
from token_id_capture.provenance import HistoryLink, KnownCall
from token_id_capture.server.continuity.canonical import Answer, History, NotTextError, UnreadableHistoryError
from token_id_capture.server.wire.response import EngineChoice

# How a policy that ended its turn itself is told from one that was cut off, as engines say it.
_ENDED = frozenset({"stop", "tool_calls", "function_call"})


class NotContinuedError(Exception):
    """The request continues no stored call; ``reason`` is one of ``reasons.CONTINUITY_REASONS``."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


async def known_calls(memory: RemembersHistories, rollout_id: str, history: History) -> list[KnownCall]:
    """The calls that gave a history's answers, as far as ``continued_call`` looks at them.

    Of answers that came back without reasoning that is the last known one.
    """
    last = history.answers[-1]
    chains = {answer.chain for answer in history.answers if answer.reasoning or answer is last}
    found = await memory.find_calls(rollout_id, [*chains])
    others = {answer.chain for answer in history.answers} - chains
    if not others or any(call.link.chain == last.chain for call in found):
        return found
    return found + await memory.find_calls(rollout_id, [*others])


def continued_call(history: History, found: Sequence[KnownCall]) -> tuple[Answer, KnownCall]:
    """The last answer of a history that a stored call gave, and that call; ``found`` are those of its chains.

    Where several calls said the same, as retries do, it is the one whose tool-call ids came back, then the
    one whose reasoning came back, then the latest.

    Raises:
        NotContinuedError: no answer was captured, or one came back with other reasoning.
    """
    calls: dict[bytes, list[KnownCall]] = {}
    for call in found:
        calls.setdefault(call.link.chain, []).append(call)
    known = [answer for answer in history.answers if answer.chain in calls]
    if not known:
        raise NotContinuedError(reasons.UNKNOWN_HISTORY)
    if any(_is_edited(answer, calls) for answer in known):
        raise NotContinuedError(reasons.REASONING_EDITED)
    last = known[-1]

    def closeness(call: KnownCall) -> tuple[bool, bool, int]:
        return call.link.call_ids == last.call_ids, call.link.reasoning == last.reasoning, call.order

    call = max(calls[last.chain], key=closeness)
    if last.reasoning and call.link.reasoning != last.reasoning:
        raise NotContinuedError(reasons.REASONING_EDITED)
    return last, call


def _is_edited(answer: Answer, calls: Mapping[bytes, Sequence[KnownCall]]) -> bool:
    """Whether reasoning came back that none of the calls with this answer gave."""
    return bool(answer.reasoning) and all(call.link.reasoning != answer.reasoning for call in calls[answer.chain])


def link_of(history: History, choice: EngineChoice) -> HistoryLink | None:
    """By what a later request is recognised as a continuation of this choice; None if it cannot be."""
    try:
        answer = history.answered(choice.item)
    except (NotTextError, UnreadableHistoryError):
        return None
    ended = choice.finish_reason in _ENDED and not isinstance(choice.stop, str)
    return HistoryLink(answer.chain, answer.reasoning, answer.call_ids, ended)
