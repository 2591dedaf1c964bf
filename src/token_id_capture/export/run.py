"""Go through a database and write the rows of each rollout."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from token_id_capture.export.parts import Choice, Part, read_parts, read_parts_together
from token_id_capture.export.record_fields import RecordFields
from token_id_capture.export.rows import Row
from token_id_capture.lifecycle import State
from token_id_capture.store.file.read_only import read_only
from token_id_capture.store.read.evidence import count_rollouts, rollout_ids

_WORTH_PROCESSES: Final = 5_000
"""Rollouts from which on the start of more processes is soon made up for."""


class RowWriter(Protocol):
    """Where rows go."""

    def write(self, row: Row) -> None:
        """Append a row."""

    def finish(self) -> None:
        """Write what was held back."""


@dataclass(slots=True)
class Exported:
    """What an export wrote, and what it left out. ``damaged`` says what cannot be read."""

    rollouts: int = 0
    rows: int = 0
    tokens: int = 0
    sampled_tokens: int = 0
    open_rollouts: int = 0
    masked: Counter[str] = field(default_factory=Counter)
    without_record: int = 0
    damaged: list[str] = field(default_factory=list)


class Exporter:
    """One export; ``show`` is told how many of how many rollouts are done.

    ``jobs`` processes read the rollouts; 0 is as many as there are processors, if the rollouts are many.
    """

    def __init__(
        self,
        database: Path,
        writer: RowWriter,
        choice: Choice,
        *,
        fields: RecordFields | None = None,
        jobs: int = 0,
        show: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._database = database
        self._writer = writer
        self._choice = choice
        self._fields = fields
        self._absent = fields.absent if fields else {}
        self._jobs = jobs
        self._show = show
        self._exported = Exported()

    def run(self) -> Exported:
        """Export all rollouts in the order of their ids. What is retired meanwhile is passed over.

        Raises:
            OSError: the output cannot be written.
            UnusableDatabaseError: the database cannot be read.
        """
        choice = self._choice
        with read_only(self._database) as connection:
            total = count_rollouts(connection, choice.states)
            if State.OPEN not in choice.states:
                self._exported.open_rollouts = count_rollouts(connection, (State.OPEN,))
            scored = self._fields.scored if self._fields else lambda rollout_id: None
            asked = ((rollout_id, scored(rollout_id)) for rollout_id in rollout_ids(connection, choice.states))
            jobs = self._jobs or (os.cpu_count() or 1 if total >= _WORTH_PROCESSES else 1)
            parts = (
                read_parts(connection, choice, asked)
                if jobs == 1
                else read_parts_together(self._database, choice, asked, jobs)
            )
            for done, part in enumerate(parts):
                self._show(done, total)
                self._write(part)
        self._writer.finish()
        self._show(total, total)
        return self._exported

    def _write(self, part: Part) -> None:
        exported = self._exported
        exported.masked.update(part.masked)
        if part.damage is not None:
            exported.damaged.append(part.damage)
        found = self._fields.of(part.rollout_id) if self._fields else {}
        for row in part.rows:
            self._writer.write({**row, **(found if found is not None else self._absent)})
            exported.rows += 1
            exported.tokens += len(row["token_ids"])
            exported.sampled_tokens += row["loss_mask"].count(1)
        if part.rows:
            exported.rollouts += 1
            exported.without_record += found is None
