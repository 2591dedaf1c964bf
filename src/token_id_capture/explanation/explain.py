"""From what is stored of a rollout to sentences: the outcome, what led to it, and what to do. Pure.

The consumer decides, on what a freeze would give now; nothing is decided here a second time, and
nothing is frozen or recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from token_id_capture import reasons
from token_id_capture.builder import Divergence
from token_id_capture.builder.build import is_cut_off
from token_id_capture.explanation.call_tree import CallTree, PlacedCall, Role, call_tree, numbers
from token_id_capture.explanation.causes import CAUSE_REMEDIES, Suspicion, suspect
from token_id_capture.explanation.continuity import continuity_notes
from token_id_capture.explanation.divergences import Decode, ExplainedDivergence, explain_divergence
from token_id_capture.explanation.remedies import (
    CALLED_AND_LOST,
    CALLED_AND_REFUSED,
    CALLED_TOO_LATE,
    CHOICES,
    ONE_CHOICE,
    REMEDIES,
    SENTENCES,
)
from token_id_capture.explanation.stored import StoredRollout
from token_id_capture.explanation.wording import counted
from token_id_capture.lifecycle import BuildOutcome, Outcome, State
from token_id_capture.rebuild import Build, build_snapshot

SHOWN_DIVERGENCES: Final = 5

_FORBIDDING: Final = (Outcome.MASKED, Outcome.FAILED, Outcome.RELEASED)


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule that forbids training, or one fault behind it.

    ``calls`` are the ids of the calls concerned, each with particulars of its own; an empty id
    stands for the rollout as a whole.
    """

    reason: str
    what: str
    remedy: str
    calls: tuple[tuple[str, str], ...] = ()
    divergences: tuple[tuple[ExplainedDivergence, Suspicion], ...] = ()
    more_divergences: int = 0

    @property
    def remedies(self) -> tuple[str, ...]:
        """What to do: about each cause of its divergences, else about the reason itself."""
        causes = dict.fromkeys(suspicion.cause for _, suspicion in self.divergences)
        return tuple(CAUSE_REMEDIES[cause] for cause in causes) or tuple(filter(None, [self.remedy]))


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a rollout is what it is. ``outcome`` is deliverable, masked, failed or retired."""

    rollout_id: str
    state: State
    version: int
    outcome: Outcome | State
    headline: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    tree: CallTree | None = field(repr=False)


def explain(rollout: StoredRollout, decode: Decode | None = None) -> Explanation:
    """Explain a rollout, whatever its state. ``decode`` makes text of token ids, for comparisons."""
    if rollout.state == State.RETIRED:
        return _explain_retired(rollout)
    build = build_snapshot(rollout.snapshot)
    tree = None if build.output is None else call_tree(rollout.snapshot.entries, build.output)
    found = [*_findings(rollout, build.reasons, tree, decode)]
    codes = {finding.reason for finding in found}
    latest = rollout.recorded[-1] if rollout.recorded else None
    if latest is not None and latest.outcome in _FORBIDDING:
        found += [finding for finding in _recorded_findings(latest) if finding.reason not in codes]
    return Explanation(
        rollout.rollout_id,
        rollout.state,
        rollout.snapshot.version,
        build.outcome,
        _headline(rollout, build),
        tuple(found),
        (*_contradictions(rollout, build), *_notes(rollout, tree), *_on_continuity(rollout, found)),
        tree,
    )


def _explain_retired(rollout: StoredRollout) -> Explanation:
    latest = rollout.recorded[-1] if rollout.recorded else None
    end = "It is retired, and its captures are deleted"
    if latest is None:
        headline = f"{end}; no outcome was recorded."
    elif latest.outcome == Outcome.DELIVERED:
        headline = f"{end}: it was delivered, unmasked."
    else:
        headline = f"{end}; the last that was recorded of it is: {_outcome(latest)}."
    findings = () if latest is None or latest.outcome == Outcome.DELIVERED else tuple(_recorded_findings(latest))
    notes = tuple(_late(rollout))
    return Explanation(
        rollout.rollout_id, rollout.state, rollout.snapshot.version, State.RETIRED, headline, findings, notes, None
    )


def _headline(rollout: StoredRollout, build: Build) -> str:
    latest = rollout.recorded[-1] if rollout.recorded else None
    if build.deliverable:
        last = build.main_chain.links[-1].entry
        tokens = len(last.prompt_token_ids) + len(last.generation_token_ids)
        fate = (
            f"deliverable: {counted(build.calls, 'call forms', 'calls form')} one sequence of "
            f"{counted(tokens, 'token')}, {build.notes.generated_tokens_delivered:,} of them sampled"
        )
    else:
        fate = f"{build.outcome}: {build.reason}"
    if rollout.state == State.OPEN:
        return f"It is open. Frozen now, it would be {fate}."
    if latest is None:
        return f"It is frozen, and nobody has recorded an outcome. Built now, it would be {fate}."
    if latest.outcome == Outcome.DELIVERED and build.deliverable:
        return f"It was delivered, and is {fate}."
    return f"It is frozen. The latest outcome is: {_outcome(latest)}."


def _outcome(recorded: BuildOutcome) -> str:
    return recorded.outcome + (f", {recorded.reason}" if recorded.reason else "")


def _contradictions(rollout: StoredRollout, build: Build) -> Iterator[str]:
    latest = rollout.recorded[-1] if rollout.recorded else None
    if latest is None:
        return
    if latest.version < rollout.snapshot.version:
        yield (
            f"The outcome was recorded for version {latest.version}; later flags raised the version to "
            f"{rollout.snapshot.version}."
        )
    if (latest.outcome == Outcome.DELIVERED) != build.deliverable:
        now = build.outcome if build.deliverable else f"{build.outcome}, {build.reason}"
        yield f"Built again now, it would be: {now}."


def _findings(
    rollout: StoredRollout, found: Sequence[str], tree: CallTree | None, decode: Decode | None
) -> Iterator[Finding]:
    for reason in found:
        code, detail = reasons.split_reason(reason)
        if code == reasons.CAPTURE_INCOMPLETE:
            yield _finding(code)
            yield from _flag_findings(rollout)
        elif code in (reasons.MULTIPLE_ROOTS, reasons.MULTIPLE_CHAINS) and tree is not None:
            yield _with_divergences(rollout, code, tree, decode)
        elif code == reasons.UNRESOLVED_RETRY and tree is not None:
            yield _unresolved(tree)
        elif code == reasons.ABORTED_CALL and tree is not None:
            yield _finding(code, tree.output.notes.aborted_calls)
        elif code == reasons.EMPTY_GENERATIONS and tree is not None:
            yield _finding(code, tree.output.notes.empty_generation_calls)
        elif code == reasons.NOTHING_RECORDED:
            yield Finding(code, SENTENCES[code], _about_nothing(rollout))
        else:
            yield _finding(code, detail=detail)


def _about_nothing(rollout: StoredRollout) -> str:
    if rollout.flags or rollout.open_calls:
        return CALLED_AND_LOST
    if rollout.refused_calls:
        return CALLED_AND_REFUSED
    return CALLED_TOO_LATE if rollout.late_calls else REMEDIES[reasons.NOTHING_RECORDED]


def _flag_findings(rollout: StoredRollout) -> Iterator[Finding]:
    by_reason: dict[str, dict[tuple[str, str], None]] = {}
    for flag in rollout.flags:
        by_reason.setdefault(flag.reason, {})[flag.model_call_id, flag.detail] = None
    for reason, calls in by_reason.items():
        yield Finding(reason, *_words(reason), tuple(calls))
    flagged = {flag.model_call_id for flag in rollout.flags}
    running = "; the rollout is open, so it may still run" if rollout.state == State.OPEN else ""
    late = dict.fromkeys(rollout.late_calls, "; its answer came after the rollout was frozen")
    lost = [
        (call.model_call_id, f"begun by {call.process}{running}{late.get(call.model_call_id, '')}")
        for call in rollout.open_calls
        if call.model_call_id not in flagged
    ]
    if lost:
        yield Finding(reasons.CALL_LOST, *_words(reasons.CALL_LOST), tuple(lost))


def _with_divergences(rollout: StoredRollout, code: str, tree: CallTree, decode: Decode | None) -> Finding:
    of_roots = code == reasons.MULTIPLE_ROOTS
    wanted: list[Divergence] = [
        noted for noted in tree.output.notes.divergences if (noted.parent_call_id is None) == of_roots
    ]
    shown = [explain_divergence(tree, noted, decode) for noted in wanted[:SHOWN_DIVERGENCES]]
    lost = len({flag.model_call_id for flag in rollout.flags} | {call.model_call_id for call in rollout.open_calls})
    return Finding(
        code,
        *_words(code),
        calls=tuple((divergence.call.entry.model_call_id, "") for divergence in shown),
        divergences=tuple((divergence, suspect(divergence, lost)) for divergence in shown),
        more_divergences=len(wanted) - len(shown),
    )


def _recorded_findings(recorded: BuildOutcome) -> Iterator[Finding]:
    """What an outcome says by itself, for where the captures cannot be asked any more."""
    first = [recorded.reason] if recorded.reason else []
    details: dict[str, str] = {}
    for reason in (*first, *recorded.all_reasons):
        code, detail = reasons.split_reason(reason)
        details[code] = detail or details.get(code, "")
    for code, detail in details.items():
        yield _finding(code, detail=detail)


def _unresolved(tree: CallTree) -> Finding:
    """Answers to one prompt, none of them continued: retries, or the choices of a single request."""
    calls = tree.output.notes.unresolved_retries
    requests = {tree.find(call).choice_of for call in calls}
    found = _finding(reasons.UNRESOLVED_RETRY, calls)
    return replace(found, what=CHOICES, remedy=ONE_CHOICE) if len(requests) == 1 and "" not in requests else found


def _finding(reason: str, calls: Sequence[str] = (), detail: str = "") -> Finding:
    concerned = [(call, "") for call in calls] or ([("", detail)] if detail else [])
    return Finding(reason, *_words(reason), tuple(concerned))


def _words(reason: str) -> tuple[str, str]:
    """What a reason means, and what to do about it."""
    if reason not in SENTENCES:
        return "This package does not define this reason; the program that recorded it does.", ""
    return SENTENCES[reason], REMEDIES[reason]


def _notes(rollout: StoredRollout, tree: CallTree | None) -> Iterator[str]:
    if tree is not None:
        yield from _left_out(tree)
    if rollout.refused_calls:
        refused = counted(len(rollout.refused_calls), "call was", "calls were")
        yield f"{refused} refused by the engine before it generated anything; nothing is missing there."
    yield from _late(rollout)


def _on_continuity(rollout: StoredRollout, found: Sequence[Finding]) -> Iterator[str]:
    causes = {suspicion.cause for finding in found for _, suspicion in finding.divergences}
    return continuity_notes(rollout.snapshot.entries, causes)


def _left_out(tree: CallTree) -> Iterator[str]:
    by_role: dict[Role, list[PlacedCall]] = {}
    for call in tree.calls:
        by_role.setdefault(call.role, []).append(call)
    left_out = by_role.get(Role.RETRY, [])
    if choices := [call for call in left_out if call.is_choice_beside(call.same_as)]:
        yield f"Left out as choices of a call of which another choice was continued: {_calls(choices)}."
    retries = [call for call in left_out if not call.is_choice_beside(call.same_as)]
    if cut_off := [call for call in retries if is_cut_off(call.entry)]:
        yield f"Left out as cut off by the engine, beside another answer to the same prompt: {_calls(cut_off)}."
    if retries := [call for call in retries if not is_cut_off(call.entry)]:
        yield f"Left out as retries, of which another answer was continued: {_calls(retries)}."
    if copies := by_role.get(Role.COPY):
        yield f"Left out as copies, token for token, of another call: {_calls(copies)}."
    if (empty := by_role.get(Role.EMPTY)) and tree.output.chains:
        yield f"Left out because nothing was generated: {_calls(empty)}."


def _late(rollout: StoredRollout) -> Iterator[str]:
    if rollout.late_calls:
        late = counted(len(rollout.late_calls), "call")
        yield f"{late} came too late, after the rollout was closed for writing, and changed nothing."


def _calls(calls: list[PlacedCall]) -> str:
    return f"call {numbers(calls)}" if len(calls) == 1 else f"calls {numbers(calls)}"
