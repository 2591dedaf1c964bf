"""What the agents will do: rollouts of several turns, drawn from a seed, with the faults of real harnesses."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

QUESTIONS = (
    "What is a river?",
    "What is a lamp?",
    "What is a cat?",
    "What is a café?",
    "Count to 7.",
    "What is 3 plus 4?",
    "Hello!",
    "Think first.",
)
WEATHER = ("How is the weather in Oslo?", "How is the weather in Tokyo?", "How is the weather in Rome?")


class Kind(StrEnum):
    """How an agent keeps its conversation."""

    CHAT = "chat"
    TOOLS = "chat with tools"
    TEXT = "text completions"
    TOKENS = "token-array completions"


class Act(StrEnum):
    """How a turn goes."""

    PLAIN = "plain"
    RETRY = "retry"
    """The answer is dismissed and asked for again, with another seed."""
    HANG_UP = "hang up in the stream"
    """The client hangs up in the middle of a stream, and asks again."""
    HANG_UP_EARLY = "hang up before the response"
    """The client hangs up before any byte of the response came, and asks again."""
    HANG_UP_AT_END = "hang up at the finish reason"
    """The client has all that it wants when it sees the finish reason, and hangs up."""
    TWO_CHOICES = "two choices"
    """``n: 2``; the conversation continues with the second."""
    REFUSED = "refused first"
    """A request that the engine refuses, then a good one."""
    SHORT = "cut by length"
    STOP = "stop string"
    """A stop string; what the policy sampled beyond it is in the ids and not in the text."""


REPEATED = frozenset({Act.RETRY, Act.HANG_UP, Act.HANG_UP_EARLY})
"""Acts after which the same prompt is sent again."""

# Repeated by weight.
_MIDDLE = (Act.PLAIN,) * 8 + (
    Act.RETRY,
    Act.HANG_UP,
    Act.HANG_UP,
    Act.HANG_UP_EARLY,
    Act.HANG_UP_AT_END,
    Act.TWO_CHOICES,
    Act.REFUSED,
    Act.SHORT,
)
_LAST = (Act.PLAIN,) * 8 + (Act.HANG_UP_AT_END, Act.HANG_UP, Act.REFUSED, Act.SHORT, Act.STOP, Act.RETRY)


@dataclass(frozen=True)
class Turn:
    """One question; ``seed`` is the sampling seed of its first request."""

    question: str
    act: Act
    stream: bool
    seed: int


@dataclass(frozen=True)
class Story:
    """One rollout. ``asks``: the client asks for token ids and log probabilities itself."""

    rollout_id: str
    kind: Kind
    asks: bool
    turns: tuple[Turn, ...]


def stories(count: int, seed: int, kinds: Iterable[Kind] = Kind, acts: Iterable[Act] = Act) -> list[Story]:
    """``count`` stories, the same for the same seed, of these kinds and acts alone."""
    kinds, acts = tuple(kinds), frozenset(acts)
    return [_story(f"e2e-{number:04}", random.Random(f"{seed}/{number}"), kinds, acts) for number in range(count)]


def _story(rollout_id: str, draw: random.Random, kinds: tuple[Kind, ...], acts: frozenset[Act]) -> Story:
    kind = draw.choice(kinds)
    asks = kind is Kind.TOKENS or draw.random() < 0.4
    length = draw.randint(1, 6)
    turns: list[Turn] = []
    for position in range(length):
        wanted = draw.choice(_MIDDLE if position < length - 1 else _LAST)
        act = wanted if wanted in acts else Act.PLAIN
        stream = act is Act.HANG_UP or act is Act.HANG_UP_AT_END or draw.random() < 0.5
        questions = WEATHER if kind is Kind.TOOLS and draw.random() < 0.7 else QUESTIONS
        turns.append(Turn(draw.choice(questions), act, stream, draw.randrange(2**31)))
    return Story(rollout_id, kind, asks, tuple(turns))
