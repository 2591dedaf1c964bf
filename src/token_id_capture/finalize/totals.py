"""What ``tokcap finalize`` counted, and what that means for its exit code."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from token_id_capture.cli.options import EXIT_PARTIAL
from token_id_capture.cli.output.units import plural


@dataclass
class Totals:
    """Counts of one run; ``reasons`` says why rows of this run were masked."""

    lines: int = 0
    written: int = 0
    masked: int = 0
    already_there: int = 0
    retired: int = 0
    refused: int = 0
    unknown: int = 0
    not_frozen: int = 0
    not_retired: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    stopped: str | None = None
    """Why the run ended before its input did."""
    signal: int = 0

    @property
    def exit_code(self) -> int:
        """0 if everything was done, 128 + the signal after one, else 1."""
        if self.signal:
            return 128 + self.signal
        failed = self.refused or self.unknown or self.not_frozen or self.not_retired or self.stopped
        return EXIT_PARTIAL if failed else 0

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {**asdict(self), "reasons": dict(self.reasons.most_common())}

    def summary(self) -> list[str]:
        """For a person: what was done, why rows were masked, why it stopped."""
        done = [
            f"{plural(self.written, 'row')} written, {self.masked:,} of them masked",
            *_unless_zero(self.already_there, "there already"),
            *_unless_zero(self.retired, "retired"),
            *_unless_zero(self.refused, "refused"),
            *_unless_zero(self.unknown, "unknown"),
            *_unless_zero(self.not_frozen, "not frozen"),
            *_unless_zero(self.not_retired, "not retired"),
        ]
        return [", ".join(done), *(self.stopping() if self.stopped else self.histogram())]

    def stopping(self) -> list[str]:
        """Why the run ended early, with the reasons of the masked rows, the most frequent first."""
        return [self.stopped, *self.histogram()] if self.stopped else []

    def histogram(self) -> list[str]:
        """The reasons of the masked rows of this run, the most frequent first."""
        return [f"{count:>6} masked: {reason}" for reason, count in self.reasons.most_common()]


def _unless_zero(count: int, what: str) -> list[str]:
    return [f"{count:,} {what}"] if count else []
