"""What the demo prints."""

from __future__ import annotations

import shlex
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from token_id_capture.cli.output.tables import print_table
from token_id_capture.lifecycle import Outcome
from token_id_capture.reasons import BUILD_REASONS

if TYPE_CHECKING:
    from token_id_capture.cli.demo.checks import CheckedRollout


@dataclass
class Report:
    """One finished demo."""

    directory: Path
    kept: bool
    seconds: float
    outcomes: list[CheckedRollout]
    rollouts: Path
    output: Path
    database: Path

    @property
    def problems(self) -> list[str]:
        """Everything that is not as it must be."""
        return [f"{outcome.rollout_id}: {problem}" for outcome in self.outcomes for problem in outcome.problems]

    def count(self, outcome: Outcome) -> int:
        """How many rollouts ended like this."""
        return sum(one.outcome == outcome for one in self.outcomes)

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "ok": not self.problems,
            "problems": self.problems,
            "delivered": self.count(Outcome.DELIVERED),
            "masked": self.count(Outcome.MASKED),
            "delivered_tokens": sum(outcome.delivered_tokens for outcome in self.outcomes),
            "largest_difference": max(outcome.largest_difference for outcome in self.outcomes),
            "rollouts": [asdict(outcome) for outcome in self.outcomes],
            "seconds": round(self.seconds, 3),
            "kept": self.kept,
            "directory": str(self.directory),
            "files": {
                "database": str(self.database),
                "rollouts": str(self.rollouts),
                "rows": str(self.output),
            },
        }

    def print(self) -> None:
        """For a person."""
        rows = [
            (outcome.rollout_id, outcome.what, outcome.calls, outcome.delivered_tokens, outcome.outcome, outcome.reason)
            for outcome in self.outcomes
        ]
        print_table(("rollout", "its agent", "calls", "tokens", "outcome", "reason"), rows)
        for outcome in self.outcomes:
            self._print_why(outcome)
        print()
        delivered, masked = self.count(Outcome.DELIVERED), self.count(Outcome.MASKED)
        print(f"{delivered} rollouts delivered, {masked} masked, in {self.seconds:.1f} s.")
        if not self.problems:
            tokens = f"{sum(outcome.delivered_tokens for outcome in self.outcomes):,}"
            print(
                f"The model itself gives each of the {tokens} delivered tokens exactly the log probability delivered."
            )
        if self.kept:
            self._print_files()

    def _print_why(self, outcome: CheckedRollout) -> None:
        if outcome.outcome != Outcome.MASKED:
            return
        print(f"\n{outcome.rollout_id} is masked: {BUILD_REASONS.get(outcome.reason, outcome.reason)}")
        for call in outcome.lost_calls:
            killed = f"process {call['pid']} on {call['host']}, which was killed"
            print(f"  lost: call {call['model_call_id']}, begun by {killed}")

    def _print_files(self) -> None:
        database = shlex.quote(str(self.database))
        print(f"\nFiles in {self.directory}")
        print(f"  {self.database.name:20}  every captured call, and the evidence of what was masked")
        print(f"  {self.rollouts.name:20}  the finished rollouts, as their harness wrote them")
        print(f"  {self.output.name:20}  the training rows")
        print("\nLook further")
        page = shlex.quote(str(self.directory / "lost-call.html"))
        for arguments in (
            f"ls --database {database}",
            f"explain lost-call --database {database}",
            f"show lost-call --database {database}",
            f"report lost-call --database {database} --output {page}",
            f'sql --database {database} "SELECT rollout_id, model_call_id, pid, process_started FROM lost_calls"',
        ):
            print(f"  {_program()} {arguments}")


def _program() -> str:
    """How the shell at hand finds this program: the environment that it is in need not be active."""
    installed = Path(sys.executable).with_name("tokcap")
    return shlex.quote(str(installed)) if shutil.which("tokcap") is None and installed.exists() else "tokcap"
