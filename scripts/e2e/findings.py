"""What a run counted, and what it found wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Findings:
    """``mismatches`` are pairs of what was compared, and the particulars with the call or rollout."""

    counts: Counter[str] = field(default_factory=Counter)
    masked: Counter[str] = field(default_factory=Counter)
    differences: list[float] = field(default_factory=list)
    reference_differences: list[float] = field(default_factory=list)
    mismatches: list[tuple[str, str]] = field(default_factory=list)

    def expect(self, kept: bool, what: str, particulars: str) -> bool:
        """Note a mismatch unless it was ``kept``."""
        if not kept:
            self.mismatches.append((what, particulars))
        return kept

    def expect_same(self, found: Sequence[object], wanted: Sequence[object], what: str, where: str) -> None:
        """Note a mismatch, with the first place of it, unless the items are equal."""
        if len(found) != len(wanted):
            self.expect(False, what, f"{where}: {len(found)} items, not {len(wanted)}")
        for at, (one, other) in enumerate(zip(found, wanted, strict=False)):
            if one != other:
                self.expect(False, what, f"{where}: item {at} of {len(found)} is {one!r}, not {other!r}")
                return

    def as_dict(self) -> dict[str, Any]:
        """All JSON. Differences are of a row's log probability from the engine's new one, and from the reference's."""
        return {
            **dict(sorted(self.counts.items())),
            "masked_by_reason": dict(self.masked.most_common()),
            **_spread("tokens_compared", "difference", self.differences),
            **_spread("tokens_compared_with_reference", "difference_from_reference", self.reference_differences),
            "mismatches": [{"what": what, "particulars": particulars} for what, particulars in self.mismatches],
        }


def _spread(count: str, name: str, values: list[float]) -> dict[str, Any]:
    ordered = sorted(values)
    if not ordered:
        return {count: 0}
    return {
        count: len(ordered),
        f"largest_{name}": ordered[-1],
        f"p99_{name}": ordered[int(len(ordered) * 0.99)],
        f"mean_{name}": sum(ordered) / len(ordered),
    }
