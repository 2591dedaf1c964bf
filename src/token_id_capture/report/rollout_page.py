"""What the page of one rollout shows. Pure: from what was read, and its explanation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from token_id_capture.explanation import CallTree, Decode, Explanation, PlacedCall
from token_id_capture.explanation.wording import counted
from token_id_capture.lifecycle import Flag, Outcome, State
from token_id_capture.report.findings import ShownFinding, shown_findings
from token_id_capture.report.timeline import Timeline, draw_timeline
from token_id_capture.report.token_data import TokenData, token_data
from token_id_capture.report.tree_drawing import ROLES, TreeDrawing, draw_tree

if TYPE_CHECKING:
    from token_id_capture.store.read.evidence import Evidence

_EXCERPT: Final = 200

_BADGES: Final[dict[Outcome | State, tuple[str, str]]] = {
    Outcome.DELIVERED: ("delivered", "good"),
    Outcome.DELIVERABLE: ("deliverable", "good"),
    Outcome.MASKED: ("masked", "bad"),
    Outcome.FAILED: ("failed", "bad"),
}


@dataclass(frozen=True, slots=True)
class CallRow:
    """A stored call in the page's table; ``mean_log_prob`` is None if nothing was sampled."""

    call: PlacedCall
    role: str
    new_prompt_tokens: int
    mean_log_prob: float | None
    excerpt: str
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RolloutPage:
    """All that the template ``rollout.html`` needs."""

    rollout_id: str
    made_at: float
    state: str
    badge: str
    tone: str
    headline: str
    summary: str
    facts: tuple[tuple[str, str], ...]
    findings: tuple[ShownFinding, ...]
    notes: tuple[str, ...]
    calls: tuple[CallRow, ...]
    drawing: TreeDrawing | None
    timeline: Timeline
    tokens: TokenData | None
    evidence: Evidence

    @property
    def continuity(self) -> bool:
        """Whether it is told of any call how its prompt was made."""
        return any(row.call.entry.continuity is not None for row in self.calls)


def rollout_page(
    evidence: Evidence, explained: Explanation, made_at: float, decode: Decode | None = None
) -> RolloutPage:
    """Decide what is shown. ``decode`` makes text of token ids; without it only ids are shown."""
    tree = explained.tree
    badge, tone = _badge(evidence, explained)
    return RolloutPage(
        rollout_id=evidence.rollout_id,
        made_at=made_at,
        state=evidence.state,
        badge=badge,
        tone=tone,
        headline=explained.headline,
        summary=_summary(evidence, tree),
        facts=tuple(_facts(evidence, tree)),
        findings=tuple(shown_findings(explained, decode)),
        notes=explained.notes,
        calls=tuple(_call_rows(tree, evidence.flags)) if tree is not None else (),
        drawing=_drawing(tree, evidence.flags),
        timeline=draw_timeline(evidence, tree),
        tokens=token_data(tree, decode) if tree is not None else None,
        evidence=evidence,
    )


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
    """The page in two sentences, for those who cannot see its pictures."""
    if evidence.state == State.RETIRED:
        return _farewell(evidence)
    if tree is None or not tree.calls:
        return f"No calls are stored. {_missing(evidence)}"
    sampled = sum(len(call.entry.generation_token_ids) for call in tree.calls)
    notes = tree.output.notes
    return (
        f"{_count(len(tree.calls), 'call is', 'calls are')} stored, with {_count(sampled, 'sampled token')}; "
        f"they form {_count(notes.chains, 'sequence')} from {_count(notes.roots, 'first prompt')}. {_missing(evidence)}"
    )


def _farewell(evidence: Evidence) -> str:
    latest = evidence.outcomes[-1].outcome if evidence.outcomes else None
    what = "delivered, and then deleted here" if latest == Outcome.DELIVERED else "deleted by an administrator"
    return f"What was captured of it was {what}, so there are no calls and no tokens to show."


def _missing(evidence: Evidence) -> str:
    lost = sum(intent.outcome is None for intent in evidence.intents)
    parts = [_count(len(evidence.flags), "flag")] if evidence.flags else []
    parts += [_count(lost, "call that never ended", "calls that never ended")] if lost else []
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
        yield "model", ", ".join(models)
    weights = dict.fromkeys(call.entry.weight_version for call in calls if call.entry.weight_version)
    if weights:
        yield "weight versions", ", ".join(weights)
    yield "opened", utc(evidence.opened_at)
    if evidence.frozen_at is not None:
        yield "frozen", utc(evidence.frozen_at)
    if evidence.retired_at is not None:
        yield "retired", utc(evidence.retired_at)
    if evidence.snapshot.snapshot_id:
        yield "snapshot", evidence.snapshot.snapshot_id


def _recorded_facts(metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What the latest outcome says of captures that are gone."""
    for name, key in (
        ("calls", "n_calls"),
        ("sampled tokens", "generated_tokens_captured"),
        ("delivered of them", "generated_tokens_delivered"),
    ):
        if isinstance(metrics.get(key), int):
            yield name, f"{metrics[key]:,}"


def _call_rows(tree: CallTree, flags: Sequence[Flag]) -> Iterator[CallRow]:
    for call in tree.calls:
        log_probs = call.entry.generation_log_probs
        yield CallRow(
            call=call,
            role=ROLES[call.role],
            new_prompt_tokens=len(call.entry.prompt_token_ids) - call.shared,
            mean_log_prob=sum(log_probs) / len(log_probs) if log_probs else None,
            excerpt=_excerpt(call.entry.output_items),
            flags=tuple(flag.reason for flag in flags if flag.model_call_id == call.entry.model_call_id),
        )


def _drawing(tree: CallTree | None, flags: Sequence[Flag]) -> TreeDrawing | None:
    if tree is None or not tree.calls:
        return None
    return draw_tree(tree, frozenset(flag.model_call_id for flag in flags))


def _excerpt(items: Sequence[Mapping[str, Any]]) -> str:
    """The beginning of what the call said or called."""
    text = " ".join(piece for item in items for piece in _texts(item))
    return text if len(text) <= _EXCERPT else text[:_EXCERPT] + "…"


def _texts(item: Mapping[str, Any]) -> Iterator[str]:
    content = item.get("content")
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        yield from (part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    calls = item.get("tool_calls")
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    for function in (item if item.get("type") == "function_call" else None, *functions):
        if isinstance(function, dict):
            yield f"{function.get('name')}({function.get('arguments')})"


def utc(seconds: float) -> str:
    """Seconds since the epoch as a date and time."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
