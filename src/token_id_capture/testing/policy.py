"""A small language model that is real where it matters to training code.

It has no weights: its logits are noise drawn from a hash of the seed and of *every* token before,
plus a bias that makes text look like text. So it samples in microseconds on any machine, and yet it
is a true autoregressive policy: its log probabilities sum to one over the vocabulary, and teacher
forcing gives the very same numbers. If one token before a position is lost, added or changed,
nearly every log probability after it is another one. That makes it a sharp check of captured data.
"""

from __future__ import annotations

import copy
import hashlib
import math
import random
import sys
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from statistics import NormalDist
from typing import Final, NamedTuple

from token_id_capture.testing.grammar import Grammar, Options
from token_id_capture.testing.template import END_OF_TURN, VOCABULARY_SIZE

_NOISE_DEVIATION: Final = 1.2
_NOISE: Final = [NormalDist(0.0, _NOISE_DEVIATION).inv_cdf((byte + 0.5) / 256) for byte in range(256)]


class SampledToken(NamedTuple):
    """One sampled token, its log probability, and the likeliest tokens at its position."""

    token_id: int
    log_prob: float
    top: tuple[tuple[int, float], ...] = ()


class _Reader:
    """The model's state after a sequence: everything that the next distribution depends on."""

    def __init__(self, seed: int) -> None:
        self._hash = hashlib.shake_128(f"policy {seed}".encode())
        self._grammar = Grammar()

    def read(self, token_ids: Sequence[int]) -> None:
        packed = array("I", token_ids)
        if sys.byteorder == "big":
            packed.byteswap()
        self._hash.update(packed)
        for token in token_ids:
            self._grammar.advance(token)

    def copy(self) -> _Reader:
        twin = copy.copy(self)
        twin._hash, twin._grammar = self._hash.copy(), copy.copy(self._grammar)
        return twin

    def distribution(self) -> Distribution:
        options = self._grammar.options()
        noise = self._hash.digest(VOCABULARY_SIZE)
        logits = [_NOISE[noise[token]] + bias for token, bias in zip(*options, strict=True)]
        return Distribution(options, logits)


class Distribution:
    """The next-token distribution at temperature 1; tokens that are not allowed have ``-inf``."""

    def __init__(self, options: Options, logits: list[float]) -> None:
        highest = max(logits)
        self._tokens = options.tokens
        self._logits = logits
        self._log_normalizer = highest + math.log(sum([math.exp(logit - highest) for logit in logits]))

    def log_prob(self, token: int) -> float:
        """The natural logarithm of the token's probability."""
        try:
            return self._logits[self._tokens.index(token)] - self._log_normalizer
        except ValueError:
            return -math.inf

    def sample(self, generator: random.Random, temperature: float, banned: Collection[int] = ()) -> int:
        """Draw a token; ``temperature`` 0 takes the likeliest one. Not every option may be banned."""
        candidates = [
            (token, logit) for token, logit in zip(self._tokens, self._logits, strict=True) if token not in banned
        ]
        highest = max(logit for _, logit in candidates)
        if temperature == 0:
            return next(token for token, logit in candidates if logit == highest)
        weights = [math.exp((logit - highest) / temperature) for _, logit in candidates]
        return generator.choices([token for token, _ in candidates], weights)[0]

    def top(self, count: int) -> tuple[tuple[int, float], ...]:
        """The ``count`` likeliest tokens and their log probabilities, falling; fewer if fewer are allowed."""
        ranked = sorted(zip(self._logits, self._tokens, strict=True), key=lambda item: (-item[0], item[1]))
        return tuple((token, logit - self._log_normalizer) for logit, token in islice(ranked, count))


class Policy:
    """The model. Equal seeds give equal models, on every machine and in every process."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def sample(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 1.0,
        seed: int | str | None = None,
        top: int = 0,
        forced: Sequence[int] = (),
        banned: Collection[int] = (),
    ) -> Iterator[SampledToken]:
        """Sample until the turn ends, its end included, or ``max_tokens`` are there.

        Log probabilities are the model's own at temperature 1, whatever ``temperature``, ``forced``
        (the first tokens, given) and ``banned`` do to the choice: the engines call that raw.

        Raises:
            ValueError: a prompt token is outside the vocabulary, or the temperature is negative.
        """
        if not 0 <= temperature < math.inf:
            raise ValueError(f"temperature must be a non-negative number, got {temperature}")
        reader = self._reader(prompt)
        generator = random.Random(seed)
        for position in range(max_tokens):
            distribution = reader.distribution()
            token = forced[position] if position < len(forced) else distribution.sample(generator, temperature, banned)
            yield SampledToken(token, distribution.log_prob(token), distribution.top(top) if top else ())
            if token == END_OF_TURN:
                return
            reader.read((token,))

    def log_probs_of(self, token_ids: Iterable[int]) -> list[float]:
        """Teacher forcing: the log probability of each token, given all that precede it.

        ``-inf`` where the model would never say the token, as in most of a prompt. About 20
        microseconds a token.

        Raises:
            ValueError: a token is outside the vocabulary.
        """
        reader = self._reader(())
        log_probs = []
        for token in _checked(list(token_ids)):
            log_probs.append(reader.distribution().log_prob(token))
            reader.read((token,))
        return log_probs

    def _reader(self, prompt: Sequence[int]) -> _Reader:
        reader = _Reader(self.seed)
        reader.read(_checked(prompt))
        return reader


def _checked(token_ids: Sequence[int]) -> Sequence[int]:
    for token in token_ids:
        if not 0 <= token < VOCABULARY_SIZE:
            raise ValueError(f"token {token} is outside the vocabulary of {VOCABULARY_SIZE}")
    return token_ids
