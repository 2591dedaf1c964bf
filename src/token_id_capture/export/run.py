"""Go through a database and write the rows of each rollout."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from token_id_capture.errors import TokenCaptureError, UnknownRolloutError
from token_id_capture.export.record_fields import RecordFields
from token_id_capture.export.rows import Row, call_rows, trajectory_rows, why_masked
from token_id_capture.lifecycle import Sequences, State
from token_id_capture.rebuild import build_snapshot
from token_id_capture.store.read.evidence import Evidence, count_rollouts, read_evidence, rollout_ids


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
    """One export; ``show`` is told how many of how many rollouts are done."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        writer: RowWriter,
        *,
        per_request: bool = False,
        include_open: bool = False,
        sequences: Sequences = Sequences.MAIN,
        models: Collection[str] | None = None,
        fields: RecordFields | None = None,
        show: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._connection = connection
        self._writer = writer
        self._per_request = per_request
        self._sequences = sequences
        self._models = models
        self._states = (State.FROZEN, State.OPEN) if include_open else (State.FROZEN,)
        self._fields = fields
        self._absent = fields.absent if fields else {}
        self._show = show
        self._exported = Exported()

    def run(self) -> Exported:
        """Export all rollouts in the order of their ids. What is retired meanwhile is passed over.

        Raises:
            OSError: the output cannot be written.
        """
        total = count_rollouts(self._connection, self._states)
        if State.OPEN not in self._states:
            self._exported.open_rollouts = count_rollouts(self._connection, (State.OPEN,))
        for done, rollout_id in enumerate(rollout_ids(self._connection, self._states)):
            self._show(done, total)
            self._export(rollout_id)
        self._writer.finish()
        self._show(total, total)
        return self._exported

    def _export(self, rollout_id: str) -> None:
        try:
            evidence = read_evidence(self._connection, rollout_id, everything=False)
            rows = self._rows(evidence) if evidence.state in self._states else []
            self._write(rollout_id, rows)
        except UnknownRolloutError:
            pass
        except TokenCaptureError as error:
            self._exported.damaged.append(str(error))

    def _rows(self, evidence: Evidence) -> Iterable[Row]:
        if self._per_request:
            return call_rows(evidence)
        scored = self._fields.scored(evidence.rollout_id) if self._fields else None
        build = build_snapshot(evidence.snapshot, sequences=self._sequences, models=self._models, scored=scored)
        reason = why_masked(evidence, build)
        if reason is not None:
            self._exported.masked[reason] += 1
            return []
        self._exported.masked.update(row.reason for row in build.rows if row.reasons)
        return trajectory_rows(evidence, build)

    def _write(self, rollout_id: str, rows: Iterable[Row]) -> None:
        exported, before = self._exported, self._exported.rows
        found = self._fields.of(rollout_id) if self._fields else {}
        for row in rows:
            self._writer.write({**row, **(found if found is not None else self._absent)})
            exported.rows += 1
            exported.tokens += len(row["token_ids"])
            exported.sampled_tokens += row["loss_mask"].count(1)
        if exported.rows > before:
            exported.rollouts += 1
            exported.without_record += found is None
