"""Every sequence of a rollout that can be trained on, each sampled token in exactly one of them. Pure.

One sequence leads from a root to each call that nothing continues. Calls that several sequences hold
count in the first of them, and are context in the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from token_id_capture.builder.build import Joined, earliest_root
from token_id_capture.builder.call_forest import LinkedCall
from token_id_capture.builder.causes import Cause, agent_of, is_main_agent
from token_id_capture.builder.chains import MAIN_CHAIN, Chain
from token_id_capture.builder.projections import Trajectory, project_chain_trajectory
from token_id_capture.reasons import split_reason
from token_id_capture.records import TokenEntry
from token_id_capture.tokens import TokenIds


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a sequence left another one: its index, and the first token, from 0, at which they differ."""

    sequence: int
    token: int


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sequence of a rollout: the calls of ``chain``, each of which continues the one before.

    ``agent`` and ``purpose`` are those of its last call, as far as the harness tells; ``beside`` says that
    this is not a turn of a conversation. ``cause`` is why it starts anew, None for what everything began with;
    ``origin`` the sequence that it departs from. ``segment`` counts, from 0, how often its agent's
    conversation was compacted before. ``trained`` has an item a call: whether its tokens have their loss
    here. ``reasons`` say why it must not be trained on; none does if it may.
    """

    chain: Chain
    agent: str | None = None
    purpose: str | None = None
    beside: bool = False
    cause: Cause | None = None
    origin: Origin | None = None
    segment: int = 0
    trained: tuple[bool, ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        """The code of the first reason; empty if it may be trained on."""
        return split_reason(self.reasons[0])[0] if self.reasons else ""

    @property
    def calls(self) -> list[TokenEntry]:
        """Its calls, in order."""
        return [link.entry for link in self.chain.links]

    @property
    def trained_calls(self) -> list[TokenEntry]:
        """Those whose tokens have their loss here."""
        return [link.entry for link, trained in zip(self.chain.links, self.trained, strict=True) if trained]

    @property
    def length(self) -> int:
        """Tokens of the whole sequence."""
        last = self.chain.links[-1].entry
        return len(last.prompt_token_ids) + len(last.generation_token_ids)

    def trajectory(self) -> Trajectory:
        """The sequence, flat.

        Raises:
            InvalidEntryError: it is not contiguous.
        """
        return project_chain_trajectory(self.chain, self.trained)


def main_sequence_of(joined: Joined, last: LinkedCall) -> Sequence:
    """The sequence that ends in this call, as ``sequences_of`` has it first."""
    path = last.path()
    begun = next((one for one in joined.beginnings if one.call in joined.group_of(path[0])), None)
    return _sequence(joined, path, MAIN_CHAIN, begun.cause if begun is not None else None, None)


def sequences_of(joined: Joined, main: LinkedCall | None) -> list[Sequence]:
    """All sequences: that of the main agent first, if it is known, then in builder order, retries last.

    ``main`` is the last call of the main sequence. What continues it is in no sequence.
    """
    paths = _paths(joined, main)
    starts = _Starts(joined, paths)
    return [
        _sequence(joined, path, MAIN_CHAIN if path[-1] is main else f"sequence-{index}", *starts.of(index, path))
        for index, path in enumerate(paths)
    ]


def _sequence(
    joined: Joined,
    path: list[LinkedCall],
    name: str,
    cause: Cause | None,
    origin: Origin | None,
) -> Sequence:
    leaf = path[-1]
    return Sequence(
        chain=Chain(name, [one.link for one in path], path[0].prompt),
        agent=leaf.entry.agent,
        purpose=leaf.entry.purpose,
        beside=leaf.order in joined.beside,
        cause=cause,
        origin=origin,
        segment=joined.segments.get(path[0].order, 0),
        trained=(True,) * len(path),
    )


def _paths(joined: Joined, main: LinkedCall | None) -> list[list[LinkedCall]]:
    forest = joined.forest
    after = set() if main is None else _below(joined, main)
    leaves = [call for call in forest.calls if not call.children and call.order not in after and call is not main]
    leaves.sort(key=lambda leaf: (leaf.order in joined.quarantined, *earliest_root(leaf)))
    return [call.path() for call in ([] if main is None else [main]) + leaves]


def _below(joined: Joined, call: LinkedCall) -> set[int]:
    """The calls that continue this one, directly or not."""
    below: set[int] = set()
    waiting = list(call.children)
    while waiting:
        order = waiting.pop()
        below.add(order)
        waiting += joined.forest.calls[order].children
    return below


class _Starts:
    """Where sequences leave each other. A call has its place in the first of them that holds it."""

    def __init__(self, joined: Joined, paths: list[list[LinkedCall]]) -> None:
        self._joined = joined
        self._paths = paths
        self._begun = {call.order: one for one in joined.beginnings for call in joined.group_of(one.call)}
        self._place: dict[int, int] = {}
        for index, path in enumerate(paths):
            for call in path:
                self._place.setdefault(call.order, index)

    def of(self, index: int, path: list[LinkedCall]) -> tuple[Cause | None, Origin | None]:
        """Why the sequence starts anew, and where it left another one."""
        first = next(call for call in path if self._place[call.order] == index)
        for other in self._joined.group_of(first):
            if self._place.get(other.order, index) < index:
                return Cause.RETRY, self._origin(self._place[other.order], path, len(first.prompt))
        one = self._begun.get(first.order)
        if one is None and index == 0:
            return None, None
        cause = one.cause if one is not None else self._unnamed(first)
        if one is not None and cause not in (None, Cause.SUB_AGENT, Cause.AUXILIARY):
            place = self._place.get(one.earlier.order)
            return cause, None if place in (None, index) else self._origin(place, path, one.divergence.position)
        if first.parent is not None and index:
            return cause, self._origin(self._place[first.parent.order], path, first.parent.length)
        return cause, None

    def _origin(self, place: int, path: list[LinkedCall], agreed: int) -> Origin:
        """Sequences that answer or continue one call may agree in further tokens; ``agreed`` of them are known to."""
        leaves = self._paths[place][-1], path[-1]
        rest, other = (TokenIds.joined(leaf.prompt, leaf.generation)[agreed:] for leaf in leaves)
        return Origin(place, agreed + rest.common_prefix_length(other))

    def _unnamed(self, first: LinkedCall) -> Cause | None:
        """Why a sequence starts anew although it came first in time."""
        agent = agent_of(first.entry)
        if first.order in self._joined.beside:
            return Cause.AUXILIARY
        if first.parent is None:
            return None if is_main_agent(agent) else Cause.SUB_AGENT
        return Cause.BRANCH if agent == agent_of(first.parent.entry) else Cause.SUB_AGENT
