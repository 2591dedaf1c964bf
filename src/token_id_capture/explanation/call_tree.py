"""Where each call of a rollout stands among the others, as the builder decides it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from token_id_capture.builder import BuildOutput, run_builder
from token_id_capture.records import TokenEntry, call_of_choice
from token_id_capture.tokens import TokenIds


class Role(StrEnum):
    """What becomes of a call."""

    MAIN = "main"
    """Part of the one sequence that may be delivered."""
    BRANCH = "branch"
    """Part of another sequence: the calls branch, or have several roots."""
    RETRY = "retry"
    """Left out: a later call continues another answer to the same prompt."""
    UNRESOLVED = "unresolved"
    """One of several answers to a prompt, none of them continued."""
    COPY = "copy"
    """Left out: it repeats another call token for token."""
    EMPTY = "empty"
    """Left out: it generated nothing."""


@dataclass(slots=True, repr=False, eq=False)
class PlacedCall:
    """A call in the tree. ``number`` counts from 1, in the order in which the calls were stored.

    ``parent`` is the call that its prompt continues, token for token. ``same_as`` is, for a call that
    was left out, the one whose prompt it has too: another answer, or for a copy the same one. ``choice_of`` is
    the id of the request that gave this answer and others at once (``n`` > 1), empty if it gave one.
    """

    entry: TokenEntry
    number: int
    role: Role
    parent: PlacedCall | None = None
    same_as: PlacedCall | None = None
    choice_of: str = ""
    children: list[PlacedCall] = field(default_factory=list)

    @property
    def sequence(self) -> TokenIds:
        """Prompt and generation."""
        return TokenIds.joined(self.entry.prompt_token_ids, self.entry.generation_token_ids)

    @property
    def length(self) -> int:
        """Tokens of prompt and generation."""
        return len(self.entry.prompt_token_ids) + len(self.entry.generation_token_ids)

    @property
    def shared(self) -> int:
        """How many leading tokens of the prompt are the parent's sequence."""
        return self.parent.length if self.parent is not None else 0

    def __repr__(self) -> str:
        return f"PlacedCall({self.number}, {self.entry.model_call_id!r}, {self.role.value!r})"

    def is_choice_beside(self, other: PlacedCall | None) -> bool:
        """Whether both are choices of one request."""
        return other is not None and self.choice_of != "" and self.choice_of == other.choice_of

    def path(self) -> Iterator[PlacedCall]:
        """This call and those that it continues, up to the root."""
        call: PlacedCall | None = self
        while call is not None:
            yield call
            call = call.parent


@dataclass(frozen=True)
class CallTree:
    """All calls of a rollout, in the order in which they were stored, and what was built of them."""

    calls: list[PlacedCall]
    output: BuildOutput

    @property
    def roots(self) -> list[PlacedCall]:
        """The calls that continue no other, except those that generated nothing."""
        return [call for call in self.calls if call.parent is None and call.role is not Role.EMPTY]

    @cached_property
    def _by_id(self) -> dict[str, PlacedCall]:
        return {call.entry.model_call_id: call for call in self.calls}

    def find(self, model_call_id: str) -> PlacedCall:
        """The call with this id."""
        return self._by_id[model_call_id]


def call_tree(entries: Iterable[TokenEntry], output: BuildOutput | None = None) -> CallTree:
    """Place each call of a rollout, in their stored order; ``output`` is what was built of them, if known.

    Raises:
        ConflictingEntryError: one call id came with two different payloads.
    """
    entries = list(entries)
    output = run_builder(entries) if output is None else output
    role = _roles(output)
    placed: dict[str, PlacedCall] = {}
    for entry in entries:
        call_id = entry.model_call_id
        placed.setdefault(call_id, PlacedCall(entry, len(placed) + 1, role.get(call_id, Role.BRANCH)))
    for call_id, parent in output.parents.items():
        call, twin = placed[call_id], output.twins.get(call_id)
        call.same_as = None if twin is None else placed[twin]
        if parent is not None:
            call.parent = placed[parent]
            call.parent.children.append(call)
    _group_choices(placed)
    return CallTree(list(placed.values()), output)


def _roles(output: BuildOutput) -> dict[str, Role]:
    """Of all calls but those of other branches; the later a line, the stronger it is."""
    notes = output.notes
    return {
        **{link.entry.model_call_id: Role.MAIN for chain in output.chains[:1] for link in chain.links},
        **dict.fromkeys(output.quarantined, Role.RETRY),
        **dict.fromkeys(notes.unresolved_retries, Role.UNRESOLVED),
        **dict.fromkeys(notes.copied_calls, Role.COPY),
        **dict.fromkeys(notes.empty_generation_calls, Role.EMPTY),
    }


def _group_choices(placed: dict[str, PlacedCall]) -> None:
    for call_id, call in placed.items():
        first = placed.get(call_of_choice(call_id))
        if first is not None and first is not call:
            call.choice_of = first.choice_of = first.entry.model_call_id


def numbers(calls: Sequence[PlacedCall]) -> str:
    """Their numbers, runs of neighbours joined: ``1-4, 7``."""
    parts: list[list[int]] = []
    for call in calls:
        if parts and call.number == parts[-1][1] + 1:
            parts[-1][1] = call.number
        else:
            parts.append([call.number, call.number])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in parts)
