"""The calls of a rollout and their tokens, each token once however many prompts it is part of. Pure."""

from __future__ import annotations

import sys
from array import array
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from token_id_capture.explanation import CallTree, PlacedCall, Role, explain_divergence, suspect
from token_id_capture.explanation.wording import counted, what_it_looks_like
from token_id_capture.report.alignment import Step, steps_between
from token_id_capture.report.model import CallData, Divergence, Said, SequenceData, Tokens, Vocabulary
from token_id_capture.report.said import said_in
from token_id_capture.report.segments import Part, Segment, segments_of
from token_id_capture.tokens import TokenIds

if TYPE_CHECKING:
    from token_id_capture.store.read.evidence import CallTimes, Evidence

TOKEN_BUDGET: Final = 1_000_000
"""Tokens that a page embeds at most: about 8 MB, which still opens in seconds."""

_EXPLAINED: Final = 64
"""Divergences with sentences of their own; of more, only the place is told."""

_NOT_SHOWN: Final = (Role.COPY, Role.EMPTY)


class CallPages:
    """``calls`` and ``tokens`` of the page of one rollout; ``left_out`` counts calls beyond the budget."""

    def __init__(self, evidence: Evidence, tree: CallTree | None, vocabulary: Vocabulary | None) -> None:
        self._evidence = evidence
        self._tree = tree
        self._vocabulary = vocabulary
        self._pieces: dict[int, bytes] = {}
        self._divergences = {} if tree is None else dict(self._explained(tree))
        self._embedded: list[PlacedCall] = []
        self._added: dict[int, TokenIds] = {}
        self._budget = TOKEN_BUDGET
        self._flags: dict[str, list[str]] = {}
        for flag in evidence.flags:
            self._flags.setdefault(flag.model_call_id, []).append(flag.reason)
        self._latest: dict[str | None, PlacedCall] = {}
        placed = [] if tree is None else tree.calls
        self.calls: tuple[CallData, ...] = tuple(map(self._call, placed))
        self.left_out = len(placed) - len(self._embedded)
        self.tokens = self._tokens()

    def _explained(self, tree: CallTree) -> Iterator[tuple[int, tuple[PlacedCall, Divergence]]]:
        decode = None if self._vocabulary is None else self._vocabulary.decode
        lost = len(
            {flag.model_call_id for flag in self._evidence.flags}
            | {intent.model_call_id for intent in self._evidence.intents if intent.outcome is None}
        )
        for place, noted in enumerate(tree.output.notes.divergences):
            call, earlier = tree.find(noted.model_call_id), tree.find(noted.closest_call_id)
            base = _longest_before(earlier, call)
            if place >= _EXPLAINED:
                yield call.number, (base, Divergence(noted.position, noted.cause, ""))
                continue
            told = explain_divergence(tree, noted, decode)
            suspicion = suspect(told, lost)
            yield call.number, (base, Divergence(noted.position, suspicion.cause, what_it_looks_like(suspicion)))

    def _call(self, call: PlacedCall) -> CallData:
        entry = call.entry
        base, steps, divergence = self._placed(call)
        added = _put_in(entry.prompt_token_ids, steps)
        embedded = self._embed(call, base, added)
        times: CallTimes | None = self._evidence.times.get(entry.model_call_id)
        # The role in which the prompt goes on where it leaves the earlier call.
        within = Part.ASSISTANT if steps[0][1] else None
        answer = self._segments(entry.generation_token_ids, Part.ASSISTANT) if embedded else ()
        return CallData(
            number=call.number,
            id=entry.model_call_id,
            role=call.role,
            parent=call.parent.number if call.parent is not None else None,
            same_as=call.same_as.number if call.same_as is not None else None,
            base=base.number if base is not None else None,
            steps=steps,
            prompt=len(entry.prompt_token_ids),
            sampled=len(entry.generation_token_ids),
            embedded=embedded,
            segments=self._segments(added, within) if embedded else (),
            answer=answer,
            said=self._said(call, answer, embedded),
            divergence=divergence,
            agent=entry.agent,
            parent_agent=entry.parent_agent,
            purpose=entry.purpose,
            model=entry.model,
            finish_reason=entry.finish_reason,
            weight_version=entry.weight_version,
            sampling=entry.sampling or {},
            log_probs_mode=entry.log_probs_mode,
            continuity=entry.continuity.outcome if entry.continuity is not None else None,
            response_id=entry.response_id,
            flags=tuple(self._flags.get(entry.model_call_id, ())),
            begun_at=times.begun_at if times is not None else None,
            created_at=entry.created_at or None,
            stored_at=times.stored_at if times is not None else None,
        )

    def _placed(self, call: PlacedCall) -> tuple[PlacedCall | None, tuple[Step, ...], Divergence | None]:
        """What a prompt is made from, by which steps; of a divergence whatever takes the fewest new tokens."""
        prompt, agent = call.entry.prompt_token_ids, call.entry.agent
        before, self._latest[agent] = self._latest.get(agent), call
        noted = self._divergences.get(call.number)
        if noted is not None:
            candidates = dict.fromkeys(one for one in (noted[0], before) if one is not None)
            ways = [(base, steps_between(base.sequence, prompt)) for base in candidates]
            base, steps = min(ways, key=lambda way: sum(added for _, _, added in way[1]))
            return base, steps, replace(noted[1], position=steps[0][1])
        if call.parent is not None and call.same_as is None:
            return call.parent, ((0, call.parent.length, len(prompt) - call.parent.length),), None
        other = call.same_as or before
        if other is None:
            return None, ((0, 0, len(prompt)),), None
        return other, steps_between(other.sequence, prompt), None

    def _embed(self, call: PlacedCall, base: PlacedCall | None, added: TokenIds) -> bool:
        cost = len(added) + len(call.entry.generation_token_ids)
        known = base is None or base.number in self._added or base.number > call.number
        if not known or cost > self._budget:
            return False
        self._budget -= cost
        self._added[call.number] = added
        self._embedded.append(call)
        return True

    def _said(self, call: PlacedCall, answer: Sequence[Segment], embedded: bool) -> tuple[Said, ...]:
        """What the engine parsed, as far as the tokens do not show it themselves."""
        if self._vocabulary is not None and any(part is Part.TOOL_CALL for _, part in answer):
            return ()
        return said_in(call.entry.output_items, texts=self._vocabulary is None or not embedded)

    def _segments(self, ids: TokenIds, within: Part | None) -> tuple[Segment, ...]:
        if self._vocabulary is None:
            return ()
        return segments_of([self._piece(token).decode("utf-8", "replace") for token in ids], within=within)

    def _piece(self, token: int) -> bytes:
        found = self._pieces.get(token)
        if found is None:
            assert self._vocabulary is not None
            found = self._pieces[token] = self._vocabulary.piece(token)
        return found

    def _tokens(self) -> Tokens:
        ids, log_probs = bytearray(), array("f")
        for call in self._embedded:
            ids += self._added[call.number].tobytes()
            ids += call.entry.generation_token_ids.tobytes()
            log_probs.extend(call.entry.generation_log_probs)
        if sys.byteorder == "big":
            log_probs.byteswap()
        texts = None if self._vocabulary is None else {token: _text_of(piece) for token, piece in self._pieces.items()}
        return Tokens(b64encode(ids).decode(), b64encode(log_probs.tobytes()).decode(), texts)


def _longest_before(earlier: PlacedCall, call: PlacedCall) -> PlacedCall:
    """What had become of a call when another one diverged from it: the prompt agrees with all of it as far."""
    found, waiting = earlier, [earlier]
    while waiting:
        one = waiting.pop()
        waiting += (child for child in one.children if child.number < call.number)
        if one.length > found.length and one.role not in _NOT_SHOWN:
            found = one
    return found


def _text_of(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def _put_in(prompt: TokenIds, steps: Sequence[Step]) -> TokenIds:
    """The tokens of a prompt that its steps do not copy."""
    found, at = TokenIds(), 0
    for _, length, added in steps:
        found = TokenIds.joined(found, prompt[at + length : at + length + added])
        at += length + added
    return found


def sequences_of(tree: CallTree) -> tuple[SequenceData, ...]:
    """The path to the last call of each sequence, the main one first."""
    return tuple(_sequence(leaf) for leaf in _leaves(tree))


def _leaves(tree: CallTree) -> list[PlacedCall]:
    shown = [call for call in tree.calls if call.role not in _NOT_SHOWN]
    leaves = [call for call in shown if not any(child.role not in _NOT_SHOWN for child in call.children)]
    stands_in = {link.entry.model_call_id for chain in tree.output.chains[:1] for link in chain.links[-1:]}
    return sorted(leaves, key=lambda call: (call.entry.model_call_id not in stands_in, call.number))


_SEQUENCE_NAMES: Final[Mapping[Role, str]] = {
    Role.MAIN: "Main sequence",
    Role.BRANCH: "Another sequence",
    Role.RETRY: "Answer that was left out",
    Role.UNRESOLVED: "One of several last answers",
}


def _sequence(leaf: PlacedCall) -> SequenceData:
    path = _numbers([*leaf.path()][::-1])
    name = f"{_SEQUENCE_NAMES[leaf.role]}: {counted(len(path), 'call')} to call {leaf.number:,}"
    return SequenceData(f"{name}, {counted(leaf.length, 'token')}", path)


def _numbers(calls: Iterable[PlacedCall]) -> tuple[int, ...]:
    return tuple(call.number for call in calls)
