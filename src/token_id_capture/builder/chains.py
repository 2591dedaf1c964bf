"""What a builder yields: chains, and notes on what it kept, dropped and could not decide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from token_id_capture.errors import InvalidEntryError
from token_id_capture.records import TokenEntry
from token_id_capture.tokens import TokenIds

MAIN_CHAIN: Final = "main"
"""The ``chain_id`` of the one chain that may be delivered."""


@dataclass
class ChainLink:
    """One call of a chain. ``interstitial`` are the tokens between the sequence of the call before
    and this call's generation: context that nobody sampled, mask 0. Empty on the first link."""

    entry: TokenEntry
    interstitial: TokenIds


@dataclass
class Chain:
    """Calls of which each continues the one before, token for token, from ``root_prompt`` on."""

    chain_id: str
    links: list[ChainLink] = field(default_factory=list)
    root_prompt: TokenIds = field(default_factory=TokenIds)
    _proved: int = field(default=0, init=False, repr=False, compare=False)

    def validate(self) -> None:
        """Prove that the links are contiguous and have one log probability for each sampled token.

        Links that were proved are not looked at again, as a build and each of its projections ask for this.

        Raises:
            InvalidEntryError: they are not; the message names the call and the position.
        """
        if self._proved == len(self.links):
            return
        before: TokenEntry | None = None
        for link in self.links:
            entry = link.entry
            generated, log_probs = len(entry.generation_token_ids), len(entry.generation_log_probs)
            if generated != log_probs:
                raise InvalidEntryError(
                    f"call {entry.model_call_id!r} has {generated} generated tokens and {log_probs} log probabilities"
                )
            prompt = entry.prompt_token_ids
            parts = (self.root_prompt,) if before is None else (before.prompt_token_ids, before.generation_token_ids)
            expected = (*parts, link.interstitial)
            if sum(map(len, expected)) != len(prompt) or not prompt.startswith(*expected):
                raise _not_contiguous(entry.model_call_id, prompt, expected)
            before = entry
        self._proved = len(self.links)


def _not_contiguous(call_id: str, prompt: TokenIds, expected: Iterable[TokenIds]) -> InvalidEntryError:
    position = 0
    for part in expected:
        agreed = prompt[position:].common_prefix_length(part)
        position += agreed
        if agreed < len(part):
            return InvalidEntryError(
                f"the prompt of call {call_id!r} does not continue its chain: they differ at position {position}"
            )
    return InvalidEntryError(f"the prompt of call {call_id!r} has {len(prompt)} tokens; its chain has {position}")


@dataclass(frozen=True)
class Divergence:
    """A prompt that does not continue the earlier call that it resembles most.

    ``position`` counts from 0 in the closest call's prompt + generation, and is the first one at
    which the two differ; ``in_generation`` tells whether a sampled token stands there (the history
    was re-tokenised, edited or dropped) or one of the prompt (another conversation, a compaction).
    Turns count from 1 in the builder's order. ``parent_call_id`` is the call that the prompt does
    continue, None for a root. ``found_token_id`` is None if the prompt ends there. ``cause`` is a value of
    ``causes.Cause``; None if it is the first turn of the main agent, and others spoke before.
    """

    model_call_id: str
    turn: int
    prompt_length: int
    parent_call_id: str | None
    closest_call_id: str
    closest_turn: int
    closest_prompt_length: int
    closest_length: int
    position: int
    in_generation: bool
    expected_token_id: int
    found_token_id: int | None
    cause: str | None = None

    def __str__(self) -> str:
        where = "generation" if self.in_generation else "prompt"
        found = "the prompt ends" if self.found_token_id is None else f"the prompt has {self.found_token_id}"
        return (
            f"turn {self.turn} (call {self.model_call_id}) departs from turn {self.closest_turn} "
            f"(call {self.closest_call_id}) at position {self.position} of {self.closest_length}, in its {where}: "
            f"token {self.expected_token_id} there, {found}"
        )


@dataclass
class BuildNotes:
    """What a build kept, dropped and could not decide. Lists of call ids are in builder order.

    ``roots`` counts different root prompts, ``generated_tokens_captured`` what all different calls
    sampled, ``generated_tokens_delivered`` what the main chain holds of it. ``copied_calls`` repeat
    another call token for token and were left out; ``aborted_calls`` are on the main chain.
    """

    builder: str
    roots: int = 0
    chains: int = 0
    generated_tokens_captured: int = 0
    generated_tokens_delivered: int = 0
    delivered_fraction: float = 0.0
    unresolved_retries: list[str] = field(default_factory=list)
    empty_generation_calls: list[str] = field(default_factory=list)
    copied_calls: list[str] = field(default_factory=list)
    aborted_calls: list[str] = field(default_factory=list)
    divergences: list[Divergence] = field(default_factory=list)

    def count_tokens(self, *, captured: Iterable[TokenEntry], delivered: Iterable[TokenEntry]) -> None:
        """Set the three token counts from the calls that were captured and those of the main chain."""
        self.generated_tokens_captured = sum(len(entry.generation_token_ids) for entry in captured)
        self.generated_tokens_delivered = sum(len(entry.generation_token_ids) for entry in delivered)
        if self.generated_tokens_captured:
            self.delivered_fraction = round(self.generated_tokens_delivered / self.generated_tokens_captured, 4)


@dataclass
class BuildOutput:
    """All chains, the main one first, and the ids of the calls that are in none.

    ``parents`` has every call that generated tokens, those in no chain included, and the call that its
    prompt continues (None: no call). ``twins`` names, for a copy and for a retry that was left out, the
    call with the same prompt that stands for it.
    """

    chains: list[Chain]
    quarantined: list[str] = field(default_factory=list)
    notes: BuildNotes = field(default_factory=lambda: BuildNotes(builder=""))
    parents: Mapping[str, str | None] = field(default_factory=dict)
    twins: Mapping[str, str] = field(default_factory=dict)

    def main_chain(self) -> Chain:
        """The chain that may be delivered.

        Raises:
            InvalidEntryError: there is none: nothing was generated, or ``per_request`` made a
                sequence for each call.
        """
        if self.chains and self.chains[0].chain_id == MAIN_CHAIN:
            return self.chains[0]
        if self.chains:
            raise InvalidEntryError(
                f"builder {self.notes.builder!r} makes one sequence a call, for export; "
                "a single response needs 'prefix_merging'"
            )
        raise InvalidEntryError("no call has generated tokens, so there is no chain")
