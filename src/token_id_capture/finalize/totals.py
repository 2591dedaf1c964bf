"""What a run of finalize counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Totals:
    """Counts of one run; ``reasons`` says why rollouts of this run were masked, ``causes`` why
    sequences began anew: all that were written, or with one a rollout those that masked it. ``written`` counts
    rollouts and ``rows`` what was written of them; ``before`` those that were opened before ``--since``, and
    ``without_record`` those that were asked for and have no record. ``files`` are the outputs that were written as a
    whole."""

    lines: int = 0
    written: int = 0
    masked: int = 0
    dropped: int = 0
    already_there: int = 0
    retired: int = 0
    refused: int = 0
    unknown: int = 0
    without_record: int = 0
    before: int = 0
    not_frozen: int = 0
    not_retired: int = 0
    rows: int = 0
    files: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    stopped: str | None = None
    """Why the run ended before its input did."""
    signal: int = 0

    @property
    def complete(self) -> bool:
        """Whether every line was handled and every rollout that should be retired is."""
        return not (
            self.refused or self.unknown or self.without_record or self.not_frozen or self.not_retired or self.stopped
        )

    def as_dict(self) -> dict[str, Any]:
        """The counts as JSON values."""
        return {**asdict(self), "reasons": dict(self.reasons.most_common()), "causes": dict(self.causes.most_common())}
