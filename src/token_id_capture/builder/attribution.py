"""Which captured call is the answer that was scored. Pure.

A finished record has up to four witnesses. Each names the tokens of one call, or abstains. Only if all
that speak name the same tokens the answer is attributed; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from token_id_capture.builder.build import Joined
from token_id_capture.builder.call_forest import LinkedCall
from token_id_capture.builder.content import Said, is_model_authored, is_reasoning, is_tool_result, said
from token_id_capture.records import TokenEntry
from token_id_capture.tokens import TokenIds


@dataclass(frozen=True)
class ScoredAnswer:
    """What a finished record says of the answer that its reward belongs to; all optional.

    Args:
        model_call_id: the captured call itself. An unknown one says nothing.
        declared_response_id: a response id for which the record vouches: if it leads to no call, to
            several, or elsewhere than the other witnesses, the rollout is masked.
        response_id: of the record's response, as the engine gave it or as the client was shown it.
        transcript: all items of the record's response, from any role.
    """

    model_call_id: str | None = None
    declared_response_id: str | None = None
    response_id: str | None = None
    transcript: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Attribution:
    """The call that was scored, or what is wrong; neither if the record does not tell.

    ``not_captured`` is the id of a call that was scored and generated no tokens. ``problem`` says in words why
    an answer that the record declares cannot be found; both mask the rollout.
    """

    call: LinkedCall | None = None
    not_captured: str | None = None
    problem: str | None = None


@dataclass(frozen=True)
class _Candidate:
    """A stored call; ``linked`` is None if it generated nothing, and the call that it repeats for a copy."""

    entry: TokenEntry
    linked: LinkedCall | None

    @property
    def sequence(self) -> TokenIds:
        return TokenIds.joined(self.entry.prompt_token_ids, self.entry.generation_token_ids)


def attribute(joined: Joined, entries: Iterable[TokenEntry], scored: ScoredAnswer) -> Attribution:
    """Find the answer that was scored among the calls of a rollout."""
    linked = {call.call_id: call for call in joined.forest.calls} | joined.forest.copies
    calls = [_Candidate(entry, linked.get(entry.model_call_id)) for entry in entries]
    declared = None
    if scored.declared_response_id is not None:
        named = _distinct(_with_response_id(calls, scored.declared_response_id))
        if len(named) != 1:
            found = "no call has" if not named else f"{len(named)} different calls have"
            return Attribution(problem=f"{found} the declared response id {scored.declared_response_id!r}")
        declared = named[0]
    witnesses = [declared, *_witnesses(joined, calls, scored)]
    named = _distinct(one for one in witnesses if one is not None)
    if len(named) > 1 and declared is not None:
        return Attribution(
            problem=f"the declared response is call {declared.entry.model_call_id!r}, and the record shows "
            f"another one, call {named[1].entry.model_call_id!r}"
        )
    if len(named) != 1:
        return Attribution()
    return Attribution(named[0].linked) if named[0].linked else Attribution(not_captured=named[0].entry.model_call_id)


def _witnesses(joined: Joined, calls: list[_Candidate], scored: ScoredAnswer) -> Iterator[_Candidate | None]:
    if scored.model_call_id is not None:
        yield _only(one for one in calls if one.entry.model_call_id == scored.model_call_id)
    if scored.response_id is not None:
        yield _only(_with_response_id(calls, scored.response_id))
    if scored.transcript:
        yield _only(_with_content(joined, calls, scored.transcript))


def _with_response_id(calls: Iterable[_Candidate], response_id: str) -> Iterator[_Candidate]:
    return (one for one in calls if response_id in response_ids(one.entry))


def response_ids(entry: TokenEntry) -> tuple[str | None, ...]:
    """The id that the engine gave the response, and the one that the client was shown."""
    return entry.response_id, entry.translation.client_response_id if entry.translation is not None else None


def _with_content(joined: Joined, calls: list[_Candidate], transcript: tuple[Any, ...]) -> Iterator[_Candidate]:
    """The calls whose own answer, or all answers up to it, is what the transcript says."""
    if is_tool_result(transcript[-1]):
        return
    whole = said(transcript)
    block = said(_trailing_block(transcript))
    if not whole:
        return
    own_wanted = {whole, block} if block else {whole}
    leads_to = _fold(0, whole)
    folded: dict[int, int] = {}
    own_of: dict[str, Said] = {}
    for call in joined.forest.calls:
        own = own_of[call.call_id] = said(call.entry.output_items)
        folded[call.order] = _fold(0 if call.parent is None else folded[call.parent.order], own)
    for one in calls:
        if one.linked is None:
            continue
        if own_of[one.linked.call_id] in own_wanted or folded[one.linked.order] == leads_to:
            yield one


def _trailing_block(transcript: tuple[Any, ...]) -> tuple[Any, ...]:
    """What the model said last, if anything stands before it; thoughts in between are passed over."""
    start = len(transcript)
    while start and (is_model_authored(transcript[start - 1]) or is_reasoning(transcript[start - 1])):
        start -= 1
    return transcript[start:] if start else ()


def _fold(before: int, parts: Said) -> int:
    """A hash of everything said so far, from that of what was said before."""
    for part in parts:
        before = hash((before, part))
    return before


def _only(candidates: Iterable[_Candidate]) -> _Candidate | None:
    named = _distinct(candidates)
    return named[0] if len(named) == 1 else None


def _distinct(candidates: Iterable[_Candidate]) -> list[_Candidate]:
    """One of each sequence: that with the smallest id."""
    found: dict[TokenIds, _Candidate] = {}
    for one in sorted(candidates, key=lambda one: one.entry.model_call_id):
        found.setdefault(one.sequence, one)
    return list(found.values())
