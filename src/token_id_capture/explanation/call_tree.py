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
    """One of several answers to a prompt of which none was continued."""
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
        """The calls that continue no other, but for those that generated nothing."""
        return [call for call in self.calls if call.parent is None and call.role is not Role.EMPTY]

    @cached_property
    def _by_id(self) -> dict[str, PlacedCall]:
        return {call.entry.model_call_id: call for call in self.calls}

    def find(self, model_call_id: str) -> PlacedCall:
        """The call with this id."""
        return self._by_id[model_call_id]


def call_tree(entries: Iterable[TokenEntry]) -> CallTree:
    """Build the calls of a rollout, in their stored order, and place each of them.

    Raises:
        ConflictingEntryError: one call id came with two different payloads.
    """
    entries = list(entries)
    output = run_builder(entries)
    unresolved, quarantined = set(output.notes.unresolved_retries), set(output.quarantined)
    copies, empty = set(output.notes.copied_calls), set(output.notes.empty_generation_calls)
    main = {link.entry.model_call_id for chain in output.chains[:1] for link in chain.links}

    def role(call_id: str) -> Role:
        if call_id in empty:
            return Role.EMPTY
        if call_id in copies:
            return Role.COPY
        if call_id in unresolved:
            return Role.UNRESOLVED
        if call_id in quarantined:
            return Role.RETRY
        return Role.MAIN if call_id in main else Role.BRANCH

    placed: dict[str, PlacedCall] = {}
    for entry in entries:
        call_id = entry.model_call_id
        placed.setdefault(call_id, PlacedCall(entry, len(placed) + 1, role(call_id)))
    _group_choices(placed)
    _link_the_left_out(placed, _link_chains(output, placed))
    return CallTree(list(placed.values()), output)


def _group_choices(placed: dict[str, PlacedCall]) -> None:
    for call_id, call in placed.items():
        first = placed.get(call_of_choice(call_id))
        if first is not None and first is not call:
            call.choice_of = first.choice_of = first.entry.model_call_id


def _link_chains(output: BuildOutput, placed: dict[str, PlacedCall]) -> list[PlacedCall]:
    """Hang the calls of all chains; returns them. Chains that branch have their first calls in common."""
    linked: dict[str, PlacedCall] = {}
    for chain in output.chains:
        above: PlacedCall | None = None
        for link in chain.links:
            call_id = link.entry.model_call_id
            if call_id not in linked:
                linked[call_id] = placed[call_id]
                _hang(placed[call_id], above)
            above = placed[call_id]
    return list(linked.values())


def _link_the_left_out(placed: dict[str, PlacedCall], linked: list[PlacedCall]) -> None:
    """Other answers and copies hang where the call with the same prompt hangs: a prompt has one parent."""
    by_length: dict[int, list[PlacedCall]] = {}

    def know(call: PlacedCall) -> None:
        by_length.setdefault(len(call.entry.prompt_token_ids), []).append(call)

    for call in linked:
        know(call)
    known = {id(call) for call in linked}
    for roles in ((Role.RETRY, Role.UNRESOLVED), (Role.COPY,)):
        for call in placed.values():
            if call.role not in roles or id(call) in known:
                continue
            asked = by_length.get(len(call.entry.prompt_token_ids), [])
            twin = next((other for other in asked if other is not call and _repeats(call, other)), None)
            if twin is not None:
                call.same_as = twin
                _hang(call, twin.parent)
            know(call)


def _repeats(call: PlacedCall, other: PlacedCall) -> bool:
    if call.entry.prompt_token_ids != other.entry.prompt_token_ids:
        return False
    return call.role is not Role.COPY or call.entry.generation_token_ids == other.entry.generation_token_ids


def _hang(call: PlacedCall, parent: PlacedCall | None) -> None:
    call.parent = parent
    if parent is not None:
        parent.children.append(call)


def numbers(calls: Sequence[PlacedCall]) -> str:
    """Their numbers, runs of neighbours joined: ``1-4, 7``."""
    parts: list[list[int]] = []
    for call in calls:
        if parts and call.number == parts[-1][1] + 1:
            parts[-1][1] = call.number
        else:
            parts.append([call.number, call.number])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in parts)
