"""The two builders, and how retries are decided."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from token_id_capture.builder.beginnings import Beginning, beginnings
from token_id_capture.builder.call_forest import CallForest, LinkedCall
from token_id_capture.builder.causes import Cause, agent_of, calls_beside
from token_id_capture.builder.chains import MAIN_CHAIN, BuildNotes, BuildOutput, Chain, ChainLink
from token_id_capture.errors import ConfigurationError, ConflictingEntryError
from token_id_capture.records import TokenEntry
from token_id_capture.tokens import TokenIds

FINISHED: Final = frozenset(
    {"stop", "length", "tool_calls", "function_call"}  # OpenAI's interface, and what engines send in it
    | {"end_turn", "max_tokens", "stop_sequence", "tool_use"}  # Anthropic's
    | {"STOP", "MAX_TOKENS"}  # Gemini's
    | {"eos_token"}  # text-generation-inference
)
"""The finish reasons of what the policy ended itself, or a limit that the caller set. After ``abort``, ``error``,
``content_filter`` and whatever is not known here, the sampled tokens are not a whole answer."""


@dataclass(frozen=True)
class Joined:
    """The calls of a rollout, joined: the chains, and what they were found from.

    ``quarantined`` and ``unresolved`` are orders of ``forest.calls``; ``empty`` are the calls that generated
    nothing.
    """

    output: BuildOutput
    forest: CallForest
    beginnings: list[Beginning]
    quarantined: frozenset[int]
    unresolved: tuple[int, ...]
    empty: list[TokenEntry]

    def group_of(self, call: LinkedCall) -> Iterable[LinkedCall]:
        """The call and all other answers to its prompt."""
        return self.forest.group_of(call)

    @cached_property
    def beside(self) -> frozenset[int]:
        """The calls, by their order, that are not turns of a conversation."""
        return calls_beside(self.forest)

    @cached_property
    def segments(self) -> dict[int, int]:
        """Of each root that begins anew, how often its agent's conversation was compacted before."""
        compacted: dict[str | None, int] = {}
        found: dict[int, int] = {}
        for one in self.beginnings:
            agent = agent_of(one.call.entry)
            if one.cause is Cause.COMPACTION:
                compacted[agent] = compacted.get(agent, 0) + 1
            found |= {call.order: compacted.get(agent, 0) for call in self.group_of(one.call)}
        return found


def prefix_merging(entries: Iterable[TokenEntry]) -> BuildOutput:
    """Join calls whose prompts continue earlier calls; see CallForest for how a parent is found.

    Of several answers to one prompt the one that a later call continues is kept and the others are
    quarantined; else the one answer that the engine did not cut off. Where neither decides, nobody knows
    which answer was used: all are named in ``unresolved_retries``, and the first one stands in for them.

    Raises:
        ConflictingEntryError: one call id came with two different payloads.
    """
    return join(entries).output


def join(entries: Iterable[TokenEntry]) -> Joined:
    """What ``prefix_merging`` gives, and how it was found.

    Raises:
        ConflictingEntryError: one call id came with two different payloads.
    """
    ordered, empty = _in_builder_order(entries)
    forest = CallForest()
    for entry in ordered:
        forest.add(entry)
    quarantined, unresolved = resolve_retries(forest)
    begun = beginnings(forest)
    chains = [
        Chain(f"branch-{number}" if number else MAIN_CHAIN, [call.link for call in path], path[0].prompt)
        for number, path in enumerate(_paths(forest, quarantined))
    ]
    main = chains[0].links if chains else []
    notes = BuildNotes(
        builder="prefix_merging",
        roots=sum(parent is None for parent, _ in forest.groups),
        chains=len(chains),
        unresolved_retries=[forest.calls[order].call_id for order in unresolved],
        empty_generation_calls=[entry.model_call_id for entry in empty],
        copied_calls=list(forest.copies),
        aborted_calls=cut_off_calls(main),
        divergences=[one.divergence for one in begun],
    )
    notes.count_tokens(captured=(call.entry for call in forest.calls), delivered=(link.entry for link in main))
    left_out = [forest.calls[order].call_id for order in sorted(quarantined)]
    output = BuildOutput(chains, left_out, notes, *_tree(forest, quarantined))
    return Joined(output, forest, begun, frozenset(quarantined), tuple(unresolved), empty)


def per_request(entries: Iterable[TokenEntry]) -> BuildOutput:
    """One sequence a call, for export: nothing is joined, and no chain is the main one.

    Raises:
        ConflictingEntryError: one call id came with two different payloads.
    """
    ordered, empty = _in_builder_order(entries)
    chains = [
        Chain(f"request-{number}", [ChainLink(entry, TokenIds())], entry.prompt_token_ids)
        for number, entry in enumerate(ordered)
    ]
    notes = BuildNotes(
        builder="per_request",
        roots=len(chains),
        chains=len(chains),
        empty_generation_calls=[entry.model_call_id for entry in empty],
        aborted_calls=[entry.model_call_id for entry in ordered if is_cut_off(entry)],
    )
    notes.count_tokens(captured=ordered, delivered=ordered)
    return BuildOutput(chains, [], notes)


_BUILDERS: Final[dict[str, Callable[[Iterable[TokenEntry]], BuildOutput]]] = {
    "per_request": per_request,
    "prefix_merging": prefix_merging,
}


def run_builder(entries: Iterable[TokenEntry], builder: str = "prefix_merging") -> BuildOutput:
    """Build with the named builder.

    Raises:
        ConfigurationError: no builder has this name.
        ConflictingEntryError: one call id came with two different payloads.
    """
    if builder not in _BUILDERS:
        raise ConfigurationError(f"unknown builder {builder!r}: use one of {', '.join(sorted(_BUILDERS))}")
    return _BUILDERS[builder](entries)


def _in_builder_order(entries: Iterable[TokenEntry]) -> tuple[list[TokenEntry], list[TokenEntry]]:
    """Calls by prompt length, then call id, each once; and those that generated nothing."""
    by_id: dict[str, TokenEntry] = {}
    for entry in entries:
        known = by_id.setdefault(entry.model_call_id, entry)
        if known is not entry and (
            known.prompt_token_ids != entry.prompt_token_ids or known.generation_token_ids != entry.generation_token_ids
        ):
            raise ConflictingEntryError(entry.rollout_id, entry.model_call_id)
    ordered = sorted(by_id.values(), key=lambda entry: (len(entry.prompt_token_ids), entry.model_call_id))
    empty = [entry for entry in ordered if not entry.generation_token_ids]
    return [entry for entry in ordered if entry.generation_token_ids], empty


def resolve_retries(forest: CallForest) -> tuple[set[int], list[int]]:
    """The calls to leave out, and those among which nothing decides."""
    quarantined: set[int] = set()
    unresolved: list[int] = []
    for group in forest.groups.values():
        calls = list(group.values())
        if len(calls) == 1:
            continue
        kept = [call for call in calls if call.children]
        if not kept:
            # Of an answer that was cut off nobody made use.
            answers = [call for call in calls if not is_cut_off(call.entry)] or calls
            kept = answers[:1]
            unresolved += [call.order for call in answers] if len(answers) > 1 else []
        quarantined.update({call.order for call in calls} - {call.order for call in kept})
    return quarantined, sorted(unresolved)


def cut_off_calls(links: Sequence[ChainLink]) -> list[str]:
    """The calls of a chain that the engine cut off, unless the next one takes the generation up at its last token."""
    return [
        link.entry.model_call_id
        for position, link in enumerate(links)
        if is_cut_off(link.entry) and (position + 1 == len(links) or links[position + 1].interstitial)
    ]


def _paths(forest: CallForest, quarantined: set[int]) -> list[list[LinkedCall]]:
    leaves = [call for call in forest.calls if not call.children and call.order not in quarantined]
    return [leaf.path() for leaf in sorted(leaves, key=earliest_root)]


def _tree(forest: CallForest, quarantined: set[int]) -> tuple[dict[str, str | None], dict[str, str]]:
    """The parent of every call, and for each that was left out the one of the same prompt that was not."""
    calls = [(call.call_id, call) for call in forest.calls] + list(forest.copies.items())
    parents = {call_id: None if call.parent is None else call.parent.call_id for call_id, call in calls}
    twins = {call_id: call.call_id for call_id, call in forest.copies.items()}
    for group in forest.groups.values() if quarantined else ():
        kept = next(call for call in group.values() if call.order not in quarantined)
        twins |= {call.call_id: kept.call_id for call in group.values() if call.order in quarantined}
    return parents, twins


def earliest_root(leaf: LinkedCall) -> tuple[float, str]:
    """By what sequences are ordered: the time and the id of their first call."""
    return leaf.root_created_at, leaf.root_call_id


def is_cut_off(entry: TokenEntry) -> bool:
    """Whether the engine ended the generation before the policy, or a limit of the caller, did."""
    return entry.finish_reason is not None and entry.finish_reason not in FINISHED
