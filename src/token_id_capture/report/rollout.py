"""One rollout as a page shows it: from what was read of it, and its explanation. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from token_id_capture.explanation import CallTree, Explanation, Finding
from token_id_capture.explanation.wording import counted
from token_id_capture.lifecycle import Outcome, State
from token_id_capture.report.calls import CallPages, sequences_of
from token_id_capture.report.model import Concern, FindingData, OutcomeData, RolloutData, Vocabulary

if TYPE_CHECKING:
    from token_id_capture.store.read.evidence import Evidence

_CONCERNS: Final = 24

_BADGES: Final[dict[Outcome | State, tuple[str, str]]] = {
    Outcome.DELIVERED: ("delivered", "good"),
    Outcome.DELIVERABLE: ("deliverable", "good"),
    Outcome.MASKED: ("masked", "bad"),
    Outcome.FAILED: ("failed", "bad"),
}


def rollout_data(
    evidence: Evidence, explained: Explanation, made_at: float, vocabulary: Vocabulary | None = None
) -> RolloutData:
    """Decide what is shown. Without ``vocabulary`` tokens are numbers, and prompts have no text."""
    tree = explained.tree
    badge, tone = _badge(evidence, explained)
    pages = CallPages(evidence, tree, vocabulary)
    return RolloutData(
        id=evidence.rollout_id,
        state=evidence.state,
        version=evidence.snapshot.version,
        snapshot_id=evidence.snapshot.snapshot_id,
        badge=badge,
        tone=tone,
        headline=explained.headline,
        summary=_summary(evidence, tree),
        facts=tuple(_facts(evidence, tree)),
        opened_at=evidence.opened_at,
        frozen_at=evidence.frozen_at,
        retired_at=evidence.retired_at,
        findings=tuple(_finding(finding, tree) for finding in explained.findings),
        notes=explained.notes,
        calls=pages.calls,
        sequences=() if tree is None else sequences_of(tree),
        tokens=pages.tokens,
        left_out=pages.left_out,
        flags=evidence.flags,
        intents=evidence.intents,
        outcomes=tuple(OutcomeData(one.version, one.outcome, one.reason, one.recorded_at) for one in evidence.outcomes),
        late_writes=evidence.late_writes,
        made_at=made_at,
    )


def _finding(finding: Finding, tree: CallTree | None) -> FindingData:
    numbers = {call.entry.model_call_id: call.number for call in tree.calls} if tree is not None else {}
    concerns = tuple(Concern(call, numbers.get(call), particulars) for call, particulars in finding.calls[:_CONCERNS])
    more = max(0, len(finding.calls) - _CONCERNS) + finding.more_divergences
    return FindingData(finding.reason, finding.what, finding.remedies, concerns, more)


def _badge(evidence: Evidence, explained: Explanation) -> tuple[str, str]:
    latest = evidence.outcomes[-1].outcome if evidence.outcomes else None
    if explained.outcome == State.RETIRED:
        return ("delivered" if latest == Outcome.DELIVERED else "released"), "quiet"
    if evidence.state == State.OPEN:
        return "open", "running"
    if latest in (Outcome.MASKED, Outcome.FAILED):
        return _BADGES[latest]
    if latest == Outcome.DELIVERED and explained.outcome == Outcome.DELIVERABLE:
        return _BADGES[Outcome.DELIVERED]
    return _BADGES[explained.outcome]


def _summary(evidence: Evidence, tree: CallTree | None) -> str:
    if evidence.state == State.RETIRED:
        return _farewell(evidence)
    if tree is None or not tree.calls:
        return f"No calls are stored. {_missing(evidence)}"
    sampled = sum(len(call.entry.generation_token_ids) for call in tree.calls)
    notes = tree.output.notes
    return (
        f"{counted(len(tree.calls), 'call is', 'calls are')} stored, with {counted(sampled, 'sampled token')}; "
        f"they form {counted(notes.chains, 'sequence')} from {counted(notes.roots, 'first prompt')}. "
        f"{_missing(evidence)}"
    )


def _farewell(evidence: Evidence) -> str:
    latest = evidence.outcomes[-1].outcome if evidence.outcomes else None
    what = "delivered, and then deleted here" if latest == Outcome.DELIVERED else "deleted by an administrator"
    return f"Its capture was {what}, so there are no calls and no tokens to show."


def _missing(evidence: Evidence) -> str:
    lost = sum(intent.outcome is None for intent in evidence.intents)
    parts = [counted(len(evidence.flags), "flag")] if evidence.flags else []
    parts += [counted(lost, "call that never ended", "calls that never ended")] if lost else []
    if not parts:
        return "Nothing is known to be missing."
    return f"{' and '.join(parts)} {'makes' if len(evidence.flags) + lost == 1 else 'make'} it incomplete."


def _facts(evidence: Evidence, tree: CallTree | None) -> Iterator[tuple[str, str]]:
    calls = tree.calls if tree is not None else []
    yield "state", f"{evidence.state}, version {evidence.snapshot.version}"
    if calls:
        yield "calls", f"{len(calls):,}"
        yield "sampled tokens", f"{sum(len(call.entry.generation_token_ids) for call in calls):,}"
        yield "longest sequence", counted(max(call.length for call in calls), "token")
    else:
        yield from _recorded_facts(evidence.outcomes[-1].metrics if evidence.outcomes else {})
    models = dict.fromkeys(call.entry.model for call in calls if call.entry.model)
    if models:
        yield "model", _listed(list(models))
    weights = dict.fromkeys(call.entry.weight_version for call in calls if call.entry.weight_version)
    if weights:
        yield "weight versions", _listed(list(weights))
    agents = dict.fromkeys(call.entry.agent for call in calls if call.entry.agent)
    if len(agents) > 1:
        yield "agents", f"{len(agents):,}"
    yield "opened", utc(evidence.opened_at)


def _listed(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} … {names[-1]} ({len(names):,})"


def _recorded_facts(metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What the latest outcome says of captures that are gone."""
    for name, key in (
        ("calls", "n_calls"),
        ("sampled tokens", "generated_tokens_captured"),
        ("delivered of them", "generated_tokens_delivered"),
    ):
        if isinstance(metrics.get(key), int):
            yield name, f"{metrics[key]:,}"


def utc(seconds: float) -> str:
    """Seconds since the epoch as a date and time."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
