"""Which sequences must not be trained on, and why. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Final

from token_id_capture import reasons
from token_id_capture.builder.attribution import Attribution
from token_id_capture.builder.build import Joined, cut_off_calls
from token_id_capture.builder.call_forest import LinkedCall
from token_id_capture.builder.causes import Cause, agent_of, is_beside, is_main_agent
from token_id_capture.builder.sequences import Sequence
from token_id_capture.lifecycle import MAIN_AGENT
from token_id_capture.protocols import TokenCaptureSnapshot

_NAMED_CALLS: Final = 8
_Speaker = tuple[str, bool]

SPLIT_BY_CAUSE: Final = (reasons.MULTIPLE_ROOTS, reasons.MULTIPLE_CHAINS)
"""The reasons that have the causes of new beginnings behind them."""


def named(names: Collection[str]) -> str:
    """The first few of them, and how many more there are."""
    listed = list(names)
    rest = len(listed) - _NAMED_CALLS
    return ", ".join(listed[:_NAMED_CALLS]) + (f" and {rest} more" if rest > 0 else "")


@dataclass(frozen=True)
class MainSequence:
    """The last call of the main agent's sequence, or the reasons why nobody can tell which it is."""

    call: LinkedCall | None
    reasons: tuple[str, ...] = ()


def main_sequence(joined: Joined, attribution: Attribution) -> MainSequence:
    """The sequence that leads to the scored answer; else the only one that the main agent has."""
    if attribution.call is not None:
        return MainSequence(attribution.call)
    if refused := scored_answer_reasons(attribution):
        return MainSequence(None, tuple(refused))
    ours = [call for call in joined.forest.calls if is_main_agent(call.entry.agent) and call.order not in joined.beside]
    return _only_sequence(joined, ours or joined.forest.calls)


def scored_answer_reasons(attribution: Attribution) -> list[str]:
    """Why a reward belongs to nothing that was captured; empty if nothing says so."""
    if attribution.problem is not None:
        return [f"{reasons.UNKNOWN_SCORED_ANSWER}: {attribution.problem}"]
    return [f"{reasons.NOT_CAPTURED}: {attribution.not_captured}"] if attribution.not_captured else []


def _only_sequence(joined: Joined, calls: list[LinkedCall]) -> MainSequence:
    """One root and one sequence of these calls, without a doubt about which answer was used."""
    among = {call.order for call in calls}
    unresolved = [joined.forest.calls[order].call_id for order in joined.unresolved if order in among]
    prompts = [call.prompt for call in calls if call.parent is None or call.parent.order not in among]
    roots = len(set(prompts)) if len(prompts) > 1 else len(prompts)
    leaves = [call for call in calls if call.order not in joined.quarantined and among.isdisjoint(call.children)]
    found = [f"{reasons.UNRESOLVED_RETRY}: {named(unresolved)}"] if unresolved else []
    begun = [one for one in joined.beginnings if one.call.order in among]
    if roots > 1:
        first = next((f"; {one.divergence}" for one in begun if one.call.parent is None), "")
        found.append(f"{reasons.MULTIPLE_ROOTS}: {roots} roots{first}")
    if len(leaves) > max(roots, 1):
        first = next((f"; {one.divergence}" for one in begun if one.call.parent is not None), "")
        found.append(f"{reasons.MULTIPLE_CHAINS}: {len(leaves)} sequences{first}")
    return MainSequence(None, tuple(found)) if found else MainSequence(leaves[0])


def causes_of(joined: Joined) -> dict[Cause, int]:
    """How many sequences start anew for each cause; retries that were left out are none."""
    return dict(Counter(one.cause for one in joined.beginnings if one.cause is not None))


class IncompleteCapture:
    """Whose calls are lost, flagged or uncaptured."""

    def __init__(self, snapshot: TokenCaptureSnapshot, joined: Joined) -> None:
        with_tools = {agent_of(call.entry) for call in joined.forest.calls if call.entry.offers_tools}
        self._calls = {flag.model_call_id for flag in snapshot.flags} - {""}
        self._everyone = snapshot.incomplete and not snapshot.flags
        self._speakers: set[_Speaker] = set()
        for flag in snapshot.flags:
            agent = flag.origin.agent
            if agent is None:
                self._everyone = True
            else:
                self._speakers.add((agent, is_beside(flag.origin, agent in with_tools)))

    def concerns(self, sequence: Sequence) -> bool:
        """Whether something of this sequence may be missing: of its agent, or of nobody knows whom."""
        if self._everyone or (sequence.agent or MAIN_AGENT, sequence.beside) in self._speakers:
            return True
        return any(call.model_call_id in self._calls for call in sequence.calls)


def masked(sequence: Sequence, incomplete: IncompleteCapture, more: Iterable[str] = ()) -> Sequence:
    """The sequence with the reasons that forbid to train on it, whatever it is taken for; ``more`` come between."""
    found = [reasons.CAPTURE_INCOMPLETE] if incomplete.concerns(sequence) else []
    found += more
    if cut_off := cut_off_calls(sequence.chain.links):
        found.append(f"{reasons.ABORTED_CALL}: {named(cut_off)}")
    return replace(sequence, reasons=tuple(found)) if found else sequence


def of_models(sequences: list[Sequence], models: Collection[str] | None, main: Sequence | None) -> list[Sequence]:
    """Take the loss from what other models sampled than ``models``, which are names or shell patterns.

    Without ``models`` a policy is one model: that of the main sequence, else the one that all have. What more
    than one sampled, or another one, is masked.
    """
    if models is not None:
        return [_of_models(one, models) for one in sequences]
    policy = _models(main) if main is not None else set().union(*map(_models, sequences))
    return [one if _models(one) <= policy and len(policy) <= 1 else _of_several(one, policy) for one in sequences]


def _models(sequence: Sequence) -> set[str]:
    return {call.model for call in sequence.calls} - {""}


def _of_several(sequence: Sequence, policy: set[str]) -> Sequence:
    names = sorted(_models(sequence) | policy)
    return replace(sequence, reasons=(*sequence.reasons, f"{reasons.SEVERAL_MODELS}: {named(names)}"))


def _of_models(sequence: Sequence, models: Collection[str]) -> Sequence:
    trained = (any(fnmatchcase(call.model, model) for model in models) for call in sequence.calls)
    return _with_loss(sequence, tuple(trained))


def counted_once(sequences: list[Sequence]) -> list[Sequence]:
    """The loss of each call in the first sequence that may be trained on, so that no masked one takes it along."""
    counted: set[str] = set()
    found = []
    for one in sequences:
        if not one.reasons:
            ids = [call.model_call_id for call in one.calls]
            pairs = zip(ids, one.trained, strict=True)
            one = _with_loss(one, tuple(trained and call_id not in counted for call_id, trained in pairs))
            counted.update(ids)
        found.append(one)
    return found


def _with_loss(sequence: Sequence, trained: tuple[bool, ...]) -> Sequence:
    if any(trained):
        return replace(sequence, trained=trained)
    others = f"{reasons.OTHER_MODELS}: {named(sorted(_models(sequence)))}"
    return replace(sequence, trained=trained, reasons=(*sequence.reasons, others))
