"""What the engine said of each attempt, from the wire, and what must become of it: the reference of this proof.

Slow and obvious on purpose, and nothing of it is shared with the gateway or the builder.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from e2e.agents import Attempt


@dataclass(frozen=True)
class Sampled:
    """One choice of one response: what the policy read and what it sampled."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: str | None

    @property
    def sequence(self) -> tuple[int, ...]:
        return self.prompt + self.ids


@dataclass(frozen=True)
class Said:
    """One whole response of the engine."""

    tag: str
    response_id: str
    choices: tuple[Sampled, ...]
    completion_tokens: int


@dataclass(frozen=True)
class Outcome:
    """What must come out for a rollout: a sequence, or one of ``reasons`` why there is none.

    ``answers`` are the calls of the sequence: where each begins that was sampled, and its log probabilities.
    They are several where the same ids were sampled twice after the same prompt: an engine does not
    always compute the very same numbers, and either answer may stand for both.
    """

    reasons: frozenset[str] = frozenset()
    token_ids: tuple[int, ...] = ()
    loss_mask: tuple[int, ...] = ()
    answers: tuple[tuple[int, frozenset[tuple[float, ...]]], ...] = ()

    def log_probs_beside(self, found: Sequence[float]) -> tuple[float, ...]:
        """The log probabilities of the sequence; of several answers the one that was found, if it is one of them."""
        log_probs = [0.0] * len(self.token_ids)
        for start, known in self.answers:
            stop = start + len(next(iter(known)))
            there = tuple(found[start:stop])
            log_probs[start:stop] = there if there in known else min(known)
        return tuple(log_probs)


@dataclass
class Witness:
    """All that passed the wire, by the tag of the attempt."""

    said: dict[str, Said] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    """Attempts that the engine began to answer and of which no whole response came out of it."""
    uncountable: set[str] = field(default_factory=set)
    """Attempts whose response does not say all that was sampled, so that the gateway must not store them."""

    def outcome(self, attempts: Iterable[Attempt]) -> Outcome:
        """What must become of the rollout that made these attempts."""
        attempts = list(attempts)
        if any(attempt.tag in self.lost | self.uncountable for attempt in attempts):
            return Outcome(frozenset({"capture_incomplete"}))
        turns: defaultdict[int, set[Sampled]] = defaultdict(set)
        for attempt in attempts:
            if attempt.tag in self.said:
                turns[attempt.turn] |= {choice for choice in self.said[attempt.tag].choices if choice.ids}
        samples = [turns[turn] for turn in sorted(turns) if turns[turn]]
        if not samples:
            return Outcome(frozenset({"nothing_recorded", "empty_generations"}))
        chain: list[list[Sampled]] = []
        for answers, following in pairwise(samples):
            prompt = next(iter(following)).prompt
            continued = [one for one in answers if prompt[: len(one.sequence)] == one.sequence]
            if not continued:
                return Outcome(frozenset({"multiple_roots", "multiple_chains", "unresolved_retry"}))
            longest = max(continued, key=lambda one: len(one.ids)).ids
            chain.append([one for one in continued if one.ids == longest])
        if len({one.ids for one in samples[-1]}) > 1:
            return Outcome(frozenset({"unresolved_retry"}))
        return _joined([*chain, list(samples[-1])])


def _joined(chain: list[list[Sampled]]) -> Outcome:
    """The last call's sequence, with loss on what each call of the chain sampled; a call may have several answers
    with the same ids."""
    token_ids = chain[-1][0].sequence
    loss_mask = [0] * len(token_ids)
    answers = []
    for same in chain:
        call = same[0]
        loss_mask[len(call.prompt) : len(call.sequence)] = [1] * len(call.ids)
        answers.append((len(call.prompt), frozenset(one.log_probs for one in same)))
    return Outcome(frozenset(), token_ids, tuple(loss_mask), tuple(answers))


def by_rollout(attempts: Iterable[Attempt]) -> Mapping[str, list[Attempt]]:
    """The attempts of each rollout, in their order."""
    found: defaultdict[str, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        found[attempt.rollout_id].append(attempt)
    return found
