"""Where the calls of a rollout stand in a drawing: a column a turn, a lane a sequence. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from token_id_capture.explanation.call_tree import CallTree, PlacedCall, Role

_WIDE: Final = (40, 11)
_NARROW: Final = (18, 6)
"""Distance of columns and radius of a call, in pixels; narrow where there are many turns."""

_MANY_TURNS: Final = 32
_LANE: Final = 40
_MARGIN: Final = 24

ROLES: Final = {
    Role.MAIN: "main sequence",
    Role.BRANCH: "another sequence",
    Role.RETRY: "left out: another answer was continued",
    Role.UNRESOLVED: "several answers, none continued",
    Role.COPY: "left out: a copy",
    Role.EMPTY: "left out: nothing sampled",
}
"""What the legend says of each role."""


@dataclass(frozen=True, slots=True)
class Node:
    """A call at (x, y) with radius r; ``label`` is empty where there is no room."""

    number: int
    x: int
    y: int
    r: int
    label: str
    role: str
    flagged: bool
    title: str


@dataclass(frozen=True, slots=True)
class Edge:
    """The path from a call to one that continues it."""

    path: str
    role: str


@dataclass(frozen=True, slots=True)
class TreeDrawing:
    """The whole drawing; ``roles`` are those that occur, with their words."""

    width: int
    height: int
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    roles: tuple[tuple[str, str], ...]


def draw_tree(tree: CallTree, flagged: frozenset[str]) -> TreeDrawing:
    """Lay out all calls; those in ``flagged``, by call id, are marked."""
    places = _places(tree)
    deepest = max((column for column, _ in places.values()), default=0)
    lanes = max((lane for _, lane in places.values()), default=-1) + 1
    distance, radius = _NARROW if deepest >= _MANY_TURNS else _WIDE

    def at(call: PlacedCall) -> tuple[int, int]:
        column, lane = places[call.number]
        return _MARGIN + column * distance, _MARGIN + lane * _LANE

    nodes = tuple(
        Node(
            number=call.number,
            x=at(call)[0],
            y=at(call)[1],
            r=radius,
            label=str(call.number) if radius == _WIDE[1] and call.number < 1000 else "",
            role=call.role.value,
            flagged=call.entry.model_call_id in flagged,
            title=_title(call),
        )
        for call in tree.calls
    )
    edges = tuple(
        Edge(_curve(*at(call.parent), *at(call)), call.role.value) for call in tree.calls if call.parent is not None
    )
    present = {call.role for call in tree.calls}
    roles = tuple((role.value, words) for role, words in ROLES.items() if role in present)
    return TreeDrawing(2 * _MARGIN + deepest * distance, 2 * _MARGIN + (lanes - 1) * _LANE, nodes, edges, roles)


def _places(tree: CallTree) -> dict[int, tuple[int, int]]:
    """Column and lane of each call, by its number. Nothing recurses, for chains can be deep."""
    places: dict[int, tuple[int, int]] = {}
    lane = -1
    # A stack of (call, column, whether it opens a lane); what comes first must be pushed last.
    waiting = [(root, 0, True) for root in reversed(_in_order(tree.roots))]
    while waiting:
        call, column, opens_lane = waiting.pop()
        lane += opens_lane
        places[call.number] = column, lane
        children = _in_order(call.children)
        waiting += [(child, column + 1, number > 0) for number, child in reversed([*enumerate(children)])]
    empty = [call for call in tree.calls if call.number not in places]
    places.update({call.number: (column, lane + 1) for column, call in enumerate(empty)})
    return places


def _in_order(calls: list[PlacedCall]) -> list[PlacedCall]:
    """The main sequence first, so that it is a straight line; then in the order of their storing."""
    return sorted(calls, key=lambda call: (call.role is not Role.MAIN, not call.children, call.number))


def _curve(x1: int, y1: int, x2: int, y2: int) -> str:
    if y1 == y2:
        return f"M{x1} {y1}H{x2}"
    return f"M{x1} {y1}C{x1} {y2} {x1} {y2} {x2} {y2}"


def _title(call: PlacedCall) -> str:
    continues = f"continues call {call.parent.number}" if call.parent else "continues no call"
    return (
        f"Call {call.number}: {continues}, {len(call.entry.prompt_token_ids):,} prompt tokens, "
        f"{len(call.entry.generation_token_ids):,} sampled; {ROLES[call.role]}"
    )
