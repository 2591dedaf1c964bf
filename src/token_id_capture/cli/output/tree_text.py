"""The tree of a rollout's calls, drawn with numbers.

A run of calls that each continue the one before is one line, so a hundred turns are as quick to read
as three. Side branches hang below the run that they leave.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

from token_id_capture.cli.output.units import plural
from token_id_capture.explanation import CallTree, PlacedCall, Role, numbers
from token_id_capture.lifecycle import MAIN_AGENT, Purpose

_ASCII: Final = str.maketrans("┌├└─│┬", "+++-|+")


def tree_lines(tree: CallTree) -> Iterator[str]:
    """The lines of the drawing; in ASCII where standard output knows no other."""
    lines = _draw(tree)
    try:
        "┌├└─│┬".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        lines = (line.translate(_ASCII) for line in lines)
    yield from lines


def tree_rows(tree: CallTree) -> list[dict[str, Any]]:
    """The same for programs: one object a call, in the order in which they were stored."""
    departed = _departed(tree)
    rows = []
    for call in tree.calls:
        earlier, position = departed.get(call.entry.model_call_id, (None, None))
        rows.append(
            {
                "model_call_id": call.entry.model_call_id,
                "number": call.number,
                "agent": call.entry.agent,
                "purpose": call.entry.purpose,
                "role": call.role.value,
                "continues": call.parent and call.parent.entry.model_call_id,
                "shared": call.shared,
                "same_prompt_as": call.same_as and call.same_as.entry.model_call_id,
                "departs_from": earlier and earlier.entry.model_call_id,
                "departs_at": position,
            }
        )
    return rows


def _departed(tree: CallTree) -> dict[str, tuple[PlacedCall, int]]:
    """Which calls depart from which earlier call, and at which position."""
    return {one.model_call_id: (tree.find(one.closest_call_id), one.position) for one in tree.output.notes.divergences}


def _draw(tree: CallTree) -> Iterator[str]:
    sizes = _sizes(tree)
    labels = _Labels(tree)
    for root in tree.roots:
        yield from _trunk(root, "", "", sizes, labels)
    if empty := [call for call in tree.calls if call.role is Role.EMPTY]:
        yield f"{numbers(empty)}  nothing generated; left out"


def _trunk(call: PlacedCall, lead: str, margin: str, sizes: dict[int, int], labels: _Labels) -> Iterator[str]:
    """A call and all that follows from it. ``lead`` comes before its first line, ``margin`` before others."""
    runs = [*_runs(call, sizes)]
    for position, (run, sides) in enumerate(runs):
        last = position == len(runs) - 1
        if position == 0:
            yield f"{lead}{'─' if last else '┬' if lead else '┌'} {labels.of(run, last)}"
        else:
            yield f"{margin}{'└' if last else '├'} {labels.of(run, last)}"
        for side in sides:
            yield from _trunk(side, f"{margin}├─", f"{margin}│ ", sizes, labels)


def _runs(call: PlacedCall, sizes: dict[int, int]) -> Iterator[tuple[list[PlacedCall], list[PlacedCall]]]:
    """Calls that follow one another without a branch, and the branches that leave the last of them."""
    run = [call]
    while True:
        children = sorted(run[-1].children, key=lambda child: (child.role is not Role.MAIN, -sizes[id(child)]))
        if not children:
            yield run, []
            return
        trunk, *sides = children
        if sides or trunk.role is not run[-1].role:
            yield run, sorted(sides, key=lambda side: side.number)
            run = [trunk]
        else:
            run.append(trunk)


def _sizes(tree: CallTree) -> dict[int, int]:
    """How many calls each call leads to. The larger branch continues as the trunk, so trees stay flat."""
    sizes = {id(call): 1 for call in tree.calls}
    # A prompt is longer than that of the call it continues.
    for call in sorted(tree.calls, key=lambda call: -len(call.entry.prompt_token_ids)):
        if call.parent is not None:
            sizes[id(call.parent)] += sizes[id(call)]
    return sizes


class _Labels:
    """What is said of a run of calls."""

    def __init__(self, tree: CallTree) -> None:
        self._departed = _departed(tree)

    def of(self, run: list[PlacedCall], ends: bool) -> str:
        first, last = run[0], run[-1]
        said = [*self._about(first)]
        if ends and last.role is Role.MAIN:
            said.append(f"main sequence, {plural(last.length, 'token')}")
        return f"{numbers(run)}  {'; '.join(said)}".rstrip()

    def _about(self, call: PlacedCall) -> Iterator[str]:
        origin = call.entry.origin
        if origin.agent not in (None, MAIN_AGENT) and (call.parent is None or call.parent.entry.agent != origin.agent):
            yield f"agent {origin.agent}, of {origin.parent_agent or MAIN_AGENT}"
        if origin.purpose not in (None, Purpose.TURN):
            yield f"{origin.purpose} call"
        same = call.same_as.number if call.same_as is not None else None
        if call.role is Role.COPY:
            yield f"copy of {same}; left out"
        elif call.role is Role.RETRY:
            beside = call.is_choice_beside(call.same_as)
            yield f"another {'choice beside' if beside else 'answer to the prompt of'} {same}; left out"
        elif call.role is Role.UNRESOLVED:
            yield f"one of several {'choices of a call' if call.choice_of else 'answers to a prompt'}, none continued"
        if call.entry.model_call_id in self._departed:
            earlier, position = self._departed[call.entry.model_call_id]
            start = "starts anew; " if call.parent is None else ""
            yield f"{start}differs from {earlier.number} at position {position:,}"
