"""What a build yields: chains and notes, and the two forms in which a chain is handed on.

The *response* form is the one that NeMo Gym's trainers read: each generated item carries the whole
prompt that led to it, so its size grows with the square of the number of turns. That is the
format's nature. The flat ``Trajectory`` holds each token once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from token_id_capture.errors import InvalidEntryError
from token_id_capture.records import TokenEntry, strip_token_fields
from token_id_capture.tokens import LogProbs, TokenIds

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

    def validate(self) -> None:
        """Prove that the links are contiguous and have one log probability for each sampled token.

        Raises:
            InvalidEntryError: they are not; the message names the call and the position.
        """
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
    continue, None for a root. ``found_token_id`` is None if the prompt ends there.
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
    """All chains, the main one first, and the ids of the calls that are in none."""

    chains: list[Chain]
    quarantined: list[str] = field(default_factory=list)
    notes: BuildNotes = field(default_factory=lambda: BuildNotes(builder=""))

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


@dataclass(frozen=True)
class Trajectory:
    """One training sequence of N tokens; all three have length N.

    ``loss_mask`` is 1 where the policy sampled the token and 0 elsewhere; there ``log_probs`` is 0.0.
    """

    token_ids: TokenIds
    loss_mask: list[int]
    log_probs: LogProbs


def project_chain_trajectory(chain: Chain) -> Trajectory:
    """The chain as one flat sequence; time and size are linear in its tokens.

    Raises:
        InvalidEntryError: the chain is not contiguous.
    """
    chain.validate()
    token_ids = chain.root_prompt
    if chain.links:
        last = chain.links[-1].entry
        token_ids = TokenIds.joined(last.prompt_token_ids, last.generation_token_ids)
    loss_mask = [0] * len(token_ids)
    log_probs = bytearray(len(token_ids) * LogProbs.itemsize)
    for link in chain.links:
        start = len(link.entry.prompt_token_ids)
        sampled = slice(start, start + len(link.entry.generation_token_ids))
        loss_mask[sampled] = [1] * (sampled.stop - start)
        log_probs[start * LogProbs.itemsize : sampled.stop * LogProbs.itemsize] = (
            link.entry.generation_log_probs.tobytes()
        )
    return Trajectory(token_ids, loss_mask, LogProbs.from_bytes(bytes(log_probs)))


def project_main_chain_trajectory(output: BuildOutput) -> Trajectory:
    """The main chain as one flat sequence.

    Raises:
        InvalidEntryError: there is no main chain, or it is not contiguous.
    """
    return project_chain_trajectory(output.main_chain())


def project_chain_to_output_items(chain: Chain) -> list[dict[str, Any]]:
    """The chain as items of a response's ``output``, in NeMo Gym's form.

    One item a call carries ``prompt_token_ids`` (the whole contiguous prompt),
    ``generation_token_ids``, ``generation_log_probs`` and, if captured, ``routed_experts``: the item
    at ``token_item_index``, else the last one, else an empty assistant message. The size grows with
    the square of the number of turns; ``project_chain_trajectory`` does not.

    Raises:
        InvalidEntryError: the chain is not contiguous.
    """
    chain.validate()
    if not chain.links:
        return []
    last = chain.links[-1].entry
    # All prompts are slices of one list, so each token is one object however often it is listed.
    tokens = TokenIds.joined(last.prompt_token_ids, last.generation_token_ids).tolist()
    items: list[dict[str, Any]] = []
    for link in chain.links:
        entry = link.entry
        start = len(entry.prompt_token_ids)
        content = [strip_token_fields(item) for item in entry.output_items]
        if not content:
            content = [{"type": "message", "role": "assistant", "content": []}]
        carrier = content[-1 if entry.token_item_index is None else entry.token_item_index]
        carrier["prompt_token_ids"] = tokens[:start]
        carrier["generation_token_ids"] = tokens[start : start + len(entry.generation_token_ids)]
        carrier["generation_log_probs"] = entry.generation_log_probs.tolist()
        if entry.routed_experts is not None:
            carrier["routed_experts"] = entry.routed_experts
        items += content
    return items


def project_main_chain_response(rollout_id: str, output: BuildOutput, *, model: str = "") -> dict[str, Any]:
    """The main chain as an object of the Responses shape.

    ``usage`` counts sampled tokens as output and all others of the sequence as input. Without
    ``model`` the name is the one that the last call recorded.

    Raises:
        InvalidEntryError: there is no main chain, or it is not contiguous.
    """
    chain = output.main_chain()
    items = project_chain_to_output_items(chain)
    last = chain.links[-1].entry
    total = len(last.prompt_token_ids) + len(last.generation_token_ids)
    sampled = sum(len(link.entry.generation_token_ids) for link in chain.links)
    return {
        "id": f"rebuilt-{rollout_id}",
        "object": "response",
        "created_at": int(last.created_at),
        "model": model or last.model,
        "output": items,
        "usage": {"input_tokens": total - sampled, "output_tokens": sampled, "total_tokens": total},
    }


def assert_prefix_contiguity(response: Mapping[str, Any]) -> None:
    """Check that each generated item's prompt continues the sequence of the one before.

    Raises:
        AssertionError: one does not; the message names the item and the first position, from 0.
    """
    expected: list[int] = []
    for index, item in enumerate(response.get("output") or []):
        if not isinstance(item, Mapping) or item.get("generation_token_ids") is None:
            continue
        prompt, generation = list(item.get("prompt_token_ids") or []), list(item["generation_token_ids"])
        if prompt[: len(expected)] != expected:
            pairs = enumerate(zip(prompt, expected, strict=False))
            position = next((at for at, (found, wanted) in pairs if found != wanted), len(prompt))
            raise AssertionError(
                f"output item {index} does not continue the items before it: its prompt of {len(prompt)} tokens "
                f"differs at position {position} from their {len(expected)} tokens"
            )
        log_probs = item.get("generation_log_probs") or []
        if len(log_probs) != len(generation):
            raise AssertionError(
                f"output item {index} has {len(generation)} generated tokens and {len(log_probs)} log probabilities"
            )
        expected = prompt + generation
