"""What a run counted, and what it found wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Findings:
    """``mismatches`` are pairs of what was compared, and the particulars with the call or rollout."""

    counts: Counter[str] = field(default_factory=Counter)
    masked: Counter[str] = field(default_factory=Counter)
    differences: list[float] = field(default_factory=list)
    mismatches: list[tuple[str, str]] = field(default_factory=list)

    def expect(self, kept: bool, what: str, particulars: str) -> bool:
        """Note a mismatch unless it was ``kept``."""
        if not kept:
            self.mismatches.append((what, particulars))
        return kept

    def as_dict(self) -> dict[str, Any]:
        """All JSON. Differences are between the log probability of a row and the engine's recomputed one."""
        ordered = sorted(self.differences)
        return {
            **dict(sorted(self.counts.items())),
            "masked_by_reason": dict(self.masked.most_common()),
            "tokens_compared": len(ordered),
            "largest_difference": ordered[-1] if ordered else None,
            "p99_difference": ordered[int(len(ordered) * 0.99)] if ordered else None,
            "mean_difference": sum(ordered) / len(ordered) if ordered else None,
            "mismatches": [{"what": what, "particulars": particulars} for what, particulars in self.mismatches],
        }
