"""Go through a database and write the rows of each rollout."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from token_id_capture.export.parts import Choice, Part, read_parts, read_parts_together
from token_id_capture.export.record_fields import RecordFields
from token_id_capture.export.rows import Row
from token_id_capture.lifecycle import State
from token_id_capture.store.driver import Connection
from token_id_capture.store.read.evidence import ALL_ROLLOUTS, Scope, count_rollouts, rollout_ids, state_of
from token_id_capture.store.reading import Location, reading

_WORTH_PROCESSES: Final = 5_000
"""Rollouts from which on the start of more processes is soon made up for."""


@dataclass(slots=True)
class Exported:
    """What an export wrote, and what it left out.

    ``without_record`` counts rollouts that were left out because the records have none of them,
    ``without_rollout`` says what was asked for, by its id or by a record, and is not in the database.
    ``damaged`` says what cannot be read.
    """

    rollouts: int = 0
    rows: int = 0
    tokens: int = 0
    sampled_tokens: int = 0
    open_rollouts: int = 0
    masked: Counter[str] = field(default_factory=Counter)
    without_record: int = 0
    without_rollout: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


class Exporter:
    """One export; ``show`` is told how many of how many rollouts are done.

    ``jobs`` processes read the rollouts; 0 is as many as there are processors, if the rollouts are many.
    """

    def __init__(
        self,
        database: Location,
        write: Callable[[Row], None],
        choice: Choice,
        *,
        scope: Scope = ALL_ROLLOUTS,
        fields: RecordFields | None = None,
        jobs: int = 0,
        show: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._database = database
        self._write_row = write
        self._choice = choice
        self._scope = scope
        self._fields = fields
        self._jobs = jobs
        self._show = show
        self._exported = Exported()

    def run(self) -> Exported:
        """Export the rollouts in the order of their ids. What is retired meanwhile is passed over.

        Raises:
            OSError: the output cannot be written.
            UnusableDatabaseError: the database cannot be read.
        """
        choice, scope = self._choice, self._scope
        with reading(self._database) as connection:
            total = count_rollouts(connection, choice.states, scope)
            if State.OPEN not in choice.states:
                self._exported.open_rollouts = count_rollouts(connection, (State.OPEN,), scope)
            scored = self._fields.scored if self._fields else lambda rollout_id: None
            found = filter(self._has_record, rollout_ids(connection, choice.states, scope))
            asked = ((rollout_id, scored(rollout_id)) for rollout_id in found)
            jobs = self._jobs or (os.cpu_count() or 1 if total >= _WORTH_PROCESSES else 1)
            parts = (
                read_parts(connection, choice, asked)
                if jobs == 1
                else read_parts_together(self._database, choice, asked, jobs)
            )
            for done, part in enumerate(parts):
                self._show(done, total)
                self._write(part)
            self._exported.without_rollout.extend(self._not_found(connection))
        self._show(total, total)
        return self._exported

    def _write(self, part: Part) -> None:
        exported = self._exported
        exported.masked.update(part.masked)
        if part.damage is not None:
            exported.damaged.append(part.damage)
        found = self._fields.of(part.rollout_id) if self._fields else {}
        for row in part.rows:
            self._write_row({**row, **found})
            exported.rows += 1
            exported.tokens += len(row["token_ids"])
            exported.sampled_tokens += row["loss_mask"].count(1)
        if part.rows:
            exported.rollouts += 1

    def _has_record(self, rollout_id: str) -> bool:
        if self._fields is None or rollout_id in self._fields:
            return True
        self._exported.without_record += 1
        return False

    def _not_found(self, connection: Connection) -> Iterator[str]:
        """What was asked for and is not there, each with the reason."""
        listed = sorted(set(self._scope.rollout_ids))
        asked = chain(listed, () if listed or self._fields is None else self._fields.rollout_ids())
        for rollout_id in asked:
            state = state_of(connection, rollout_id)
            if state is None:
                yield f"no rollout {rollout_id!r} is in this database: check the id and --database"
            elif state is State.RETIRED:
                yield f"rollout {rollout_id!r} is retired: its rows are in the output that they were delivered to"
