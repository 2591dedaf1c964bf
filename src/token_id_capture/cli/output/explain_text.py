"""What ``tokcap explain`` prints: paragraphs for a person, or one JSON document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from token_id_capture.cli.options import print_json, print_line
from token_id_capture.cli.output.units import plural
from token_id_capture.explanation import (
    CallTree,
    Decode,
    ExplainedDivergence,
    Explanation,
    Finding,
    PlacedCall,
    Suspicion,
)
from token_id_capture.explanation.causes import CAUSE_REMEDIES
from token_id_capture.explanation.wording import what_it_looks_like, where_it_departs, which_departs
from token_id_capture.tokens import TokenIds

_INDENT = "  "
_NAMED_CALLS = 8


def print_explanation(explained: Explanation, decode: Decode | None) -> None:
    """Print it for a person, wrapped to the terminal; a pipe gets whole lines."""
    for line in _lines(explained, decode):
        print_line(line)


def print_explanation_json(explained: Explanation, decode: Decode | None) -> None:
    """Print it for programs."""
    print_json(_as_dict(explained, decode))


def _lines(explained: Explanation, decode: Decode | None) -> Iterator[str]:
    yield f"rollout {explained.rollout_id}: {explained.state}, version {explained.version}"
    yield explained.headline
    for finding in explained.findings:
        yield ""
        yield from _finding_lines(finding, explained.tree, decode)
    if explained.notes:
        yield ""
        yield from explained.notes


def _finding_lines(finding: Finding, tree: CallTree | None, decode: Decode | None) -> Iterator[str]:
    yield f"{finding.reason}: {finding.what}"
    if not finding.divergences:
        yield from (_INDENT + line for line in _call_lines(finding.calls, tree))
    for divergence, suspicion in finding.divergences:
        yield from (_INDENT + line for line in _divergence_lines(divergence, suspicion, decode))
    if finding.more_divergences:
        yield f"{_INDENT}And {plural(finding.more_divergences, 'more call')} like this."
    for remedy in finding.remedies:
        yield f"{_INDENT}What to do: {remedy}"


def _call_lines(calls: Sequence[tuple[str, str]], tree: CallTree | None) -> Iterator[str]:
    known = {call.entry.model_call_id: call for call in tree.calls} if tree is not None else {}
    for call_id, detail in calls[:_NAMED_CALLS]:
        name = _name(known[call_id]) if call_id in known else f"call {call_id}" if call_id else ""
        yield ": ".join(part for part in (name, detail) if part)
    if len(calls) > _NAMED_CALLS:
        yield f"and {len(calls) - _NAMED_CALLS} more"


def _name(call: PlacedCall) -> str:
    return f"call {call.number} ({call.entry.model_call_id})"


def _divergence_lines(divergence: ExplainedDivergence, suspicion: Suspicion, decode: Decode | None) -> Iterator[str]:
    call, earlier = divergence.call, divergence.earlier
    yield which_departs(divergence, _name)
    yield f"{where_it_departs(divergence, _name)}:"
    width = max(len(str(call.number)), len(str(earlier.number)))
    for one, ids in ((earlier, divergence.expected()), (call, divergence.found())):
        yield f"{_INDENT}call {one.number:<{width}} {_window(divergence.position, *ids)}"
    if decode is not None:
        for one, (before, after) in ((earlier, divergence.expected()), (call, divergence.found())):
            yield f"{_INDENT}call {one.number:<{width}} reads {decode([*before, *after])!r}"
    yield what_it_looks_like(suspicion)


def _window(position: int, before: TokenIds, after: TokenIds) -> str:
    """Ids around the position, which stands in brackets."""
    shown = [str(token) for token in before] + [f"[{after[0]}]" if after else "[the prompt ends]"]
    shown += [str(token) for token in after[1:]]
    return ("... " if position > len(before) else "") + " ".join(shown)


def _as_dict(explained: Explanation, decode: Decode | None) -> dict[str, Any]:
    return {
        "rollout_id": explained.rollout_id,
        "state": explained.state,
        "version": explained.version,
        "verdict": explained.outcome,
        "headline": explained.headline,
        "findings": [
            {
                "reason": finding.reason,
                "what": finding.what,
                "calls": [{"model_call_id": call_id, "detail": detail} for call_id, detail in finding.calls],
                "divergences": [_divergence_dict(*pair, decode) for pair in finding.divergences],
                # Their name in the first release; programs may read it.
                "departures": [_divergence_dict(*pair, decode) for pair in finding.divergences],
                "more_divergences": finding.more_divergences,
                "remedy": finding.remedy,
            }
            for finding in explained.findings
        ],
        "notes": explained.notes,
    }


def _divergence_dict(divergence: ExplainedDivergence, suspicion: Suspicion, decode: Decode | None) -> dict[str, Any]:
    sides = {"expected": divergence.expected(), "found": divergence.found()}
    return {
        "call": divergence.call.entry.model_call_id,
        "continues": divergence.continues and divergence.continues.entry.model_call_id,
        "closest": divergence.earlier.entry.model_call_id,
        "position": divergence.position,
        "closest_length": divergence.earlier.length,
        "sampled_by": divergence.sampled_by and divergence.sampled_by.entry.model_call_id,
        "before": divergence.expected()[0].tolist(),
        **{side: after.tolist() for side, (_, after) in sides.items()},
        **(
            {f"{side}_text": decode([*before, *after]) for side, (before, after) in sides.items()}
            if decode is not None
            else {}
        ),
        "cause": suspicion.cause.value,
        "because": suspicion.because,
        "certain": suspicion.certain,
        "remedy": CAUSE_REMEDIES[suspicion.cause],
    }
