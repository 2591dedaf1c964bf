"""What a run does, and where its files are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from token_id_capture.store.file.location import DATABASE_NAME


@dataclass(frozen=True, slots=True)
class Plan:
    """One run. Rollouts open at a steady rate, live for some seconds, and are frozen and dropped when old."""

    directory: Path
    seconds: float
    writers: int
    seed: int
    coroutines: int = 200
    kills_per_second: float = 10.0
    round_seconds: float = 30.0
    rollouts_per_second: float = 40.0
    rollout_seconds: float = 3.0
    url: str = ""
    """Of the server that is written to, if the database is on one."""

    @property
    def target(self) -> str | Path:
        """What is written to."""
        return self.url or self.database

    @property
    def database(self) -> Path:
        return self.directory / DATABASE_NAME

    @property
    def ledgers(self) -> Path:
        return self.directory / "ledger"


@dataclass(frozen=True, slots=True)
class Round:
    """A part of a run that is checked by itself. ``began`` is in seconds of the monotonic clock."""

    plan: Plan
    number: int
    began: float

    def rollout_id(self, index: int) -> str:
        return f"round{self.number}-{index}"

    def newest(self, now: float) -> int:
        """The index of the rollout that opened last."""
        return int((now - self.began) * self.plan.rollouts_per_second)

    @property
    def window(self) -> int:
        """How many rollouts live at a time."""
        return int(self.plan.rollouts_per_second * self.plan.rollout_seconds)
