"""The agents whose calls are stored: each prompt contains the prompt and the answer before it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

VOCABULARY_SIZE = 150_000
_WORDS = [
    *(" the", " of", " to", " a", " in", " file", " is", "\n", ".", ",", " def", " return", "(", ")", "ing"),
    *(" function", " error", " test", " would", " because", " configuration", "_", "=", ' "', " 0", "s", " el\u00e9"),
]


@dataclass(frozen=True)
class Workload:
    """So many rollouts at once, each of so many calls in turn; lengths in tokens."""

    name: str
    rollouts: int
    calls: int
    first_prompt: int
    generated: int
    added: int

    def prompt_length(self, call: int) -> int:
        """Tokens of the prompt of call number ``call``, from 0."""
        return self.first_prompt + call * (self.generated + self.added)

    @property
    def total_calls(self) -> int:
        """Calls of all rollouts together."""
        return self.rollouts * self.calls

    def shrunk(self, divisor: int) -> Workload:
        """The same shape with fewer rollouts, calls and tokens, to try the benchmark out."""
        smaller = {
            field: max(2, getattr(self, field) // divisor)
            for field in ("rollouts", "calls", "first_prompt", "generated", "added")
        }
        return self if divisor == 1 else replace(self, **smaller)

    def draw(self) -> Iterator[Rollout]:
        """The rollouts, the same at every run."""
        for number in range(self.rollouts):
            yield Rollout(self, f"{self.name}-{number}")


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("chat", rollouts=64, calls=4, first_prompt=512, generated=256, added=128),
        Workload("agent", rollouts=16, calls=40, first_prompt=4096, generated=300, added=700),
        Workload("long", rollouts=4, calls=100, first_prompt=4096, generated=300, added=700),
        Workload("crowd", rollouts=512, calls=4, first_prompt=512, generated=256, added=128),
    )
}


class Rollout:
    """One agent's tokens, drawn with its id as the seed, and their JSON texts."""

    def __init__(self, workload: Workload, rollout_id: str) -> None:
        self.workload = workload
        self.rollout_id = rollout_id
        rng = random.Random(rollout_id)
        length = workload.prompt_length(workload.calls - 1) + workload.generated
        self.token_ids = rng.choices(range(VOCABULARY_SIZE), k=length)
        # Doubles of full length, 18 characters or so each, as engines print them.
        self.log_probs = [-rng.expovariate(2.0) for _ in range(length)]
        self.call_ids = [f"{rng.getrandbits(128):032x}" for _ in range(workload.calls)]
        texts = [b"%d" % token_id for token_id in self.token_ids]
        self._ends = list(accumulate(len(text) + 1 for text in texts))
        self._text = b",".join(texts)

    def prompt_span(self, call: int) -> tuple[int, int]:
        """Where the prompt of a call begins and ends in ``token_ids``."""
        return 0, self.workload.prompt_length(call)

    def generation_span(self, call: int) -> tuple[int, int]:
        """Where the generation of a call begins and ends in ``token_ids``."""
        start = self.workload.prompt_length(call)
        return start, start + self.workload.generated

    def ids_json(self, start: int, end: int) -> bytes:
        """The JSON array of ``token_ids[start:end]``."""
        first = self._ends[start - 1] if start else 0
        return b"[" + self._text[first : self._ends[end - 1] - 1] + b"]"

    def words(self, start: int, end: int) -> list[str]:
        """The text of each of these tokens."""
        return [_WORDS[token_id % len(_WORDS)] for token_id in self.token_ids[start:end]]
