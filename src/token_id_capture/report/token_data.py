"""The tokens of a rollout as a compact block that the page's script reads.

Each token is embedded once, however many sequences it is part of: a call contributes the tokens that
its prompt adds to the call before it, and the ones that were sampled.
"""

from __future__ import annotations

import sys
from array import array
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from token_id_capture.explanation.call_tree import CallTree, PlacedCall, Role
from token_id_capture.explanation.wording import counted
from token_id_capture.tokens import TokenIds

TOKEN_BUDGET: Final = 1_000_000
"""Tokens that a page embeds at most: about 8 MB, which still opens in seconds."""

_NOT_SHOWN: Final = (Role.COPY, Role.EMPTY)


@dataclass(frozen=True, slots=True)
class TokenData:
    """``block`` is JSON-ready; ``left_out`` counts sequences beyond the budget."""

    block: dict[str, Any]
    sequences: tuple[str, ...]
    tokens: int
    left_out: int


def token_data(tree: CallTree, decode: Callable[[Sequence[int]], str] | None = None) -> TokenData | None:
    """Pack the sequences of a rollout, the main one first; None if it has none.

    ``block`` has ``calls``, each ``[number, context tokens, sampled tokens, call id]``; ``sequences``,
    each a list of positions in ``calls``; and in base64 ``ids`` (uint32) and ``logProbs`` (float32),
    little-endian, in the order of ``calls``. With ``decode`` also ``texts``, by token id.
    """
    position_of: dict[int, int] = {}
    sequences: list[list[int]] = []
    names: list[str] = []
    used: list[PlacedCall] = []
    tokens = left_out = 0
    for leaf in _leaves(tree):
        path = [*leaf.path()][::-1]
        added = [call for call in path if call.number not in position_of]
        cost = sum(call.length - call.shared for call in added)
        if sequences and tokens + cost > TOKEN_BUDGET:
            left_out += 1
            continue
        for call in added:
            position_of[call.number] = len(used)
            used.append(call)
        tokens += cost
        sequences.append([position_of[call.number] for call in path])
        names.append(_name(leaf, len(path)))
    if not sequences:
        return None
    block = _block(used, sequences)
    if decode is not None:
        block["texts"] = {token: decode([token]) for token in _distinct(used)}
    return TokenData(block, tuple(names), tokens, left_out)


def _leaves(tree: CallTree) -> list[PlacedCall]:
    """The last calls of all sequences, the main one first."""
    shown = [call for call in tree.calls if call.role not in _NOT_SHOWN]
    leaves = [call for call in shown if not any(child.role not in _NOT_SHOWN for child in call.children)]
    stands_in = {link.entry.model_call_id for chain in tree.output.chains[:1] for link in chain.links[-1:]}
    return sorted(leaves, key=lambda call: (call.entry.model_call_id not in stands_in, call.number))


def _name(leaf: PlacedCall, calls: int) -> str:
    what = {
        Role.MAIN: "Main sequence",
        Role.BRANCH: "Another sequence",
        Role.RETRY: "Answer that was left out",
        Role.UNRESOLVED: "One of several last answers",
    }[leaf.role]
    joined = f"{calls:,} call{'' if calls == 1 else 's'}"
    return f"{what}: {joined} up to call {leaf.number:,}, {counted(leaf.length, 'token')}"


def _block(used: list[PlacedCall], sequences: list[list[int]]) -> dict[str, Any]:
    ids = b"".join(piece.tobytes() for call in used for piece in (_context(call), call.entry.generation_token_ids))
    log_probs = array("f")
    for call in used:
        log_probs.extend(call.entry.generation_log_probs)
    if sys.byteorder == "big":
        log_probs.byteswap()
    return {
        "calls": [
            [call.number, len(_context(call)), len(call.entry.generation_token_ids), call.entry.model_call_id]
            for call in used
        ],
        "sequences": sequences,
        "ids": b64encode(ids).decode(),
        "logProbs": b64encode(log_probs.tobytes()).decode(),
    }


def _context(call: PlacedCall) -> TokenIds:
    return call.entry.prompt_token_ids[call.shared :]


def _distinct(used: Iterable[PlacedCall]) -> list[int]:
    found: set[int] = set()
    for call in used:
        found.update(_context(call))
        found.update(call.entry.generation_token_ids)
    return sorted(found)
