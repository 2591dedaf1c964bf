"""The work of ``tokcap finalize``, a batch of rollouts at a time.

One batch: freeze and build together, write the rows in the order of the input, make them durable
with one ``fsync``, and only then deliver the rollouts.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import BinaryIO, Final

from token_id_capture import reasons
from token_id_capture.builder.masks import SPLIT_BY_CAUSE
from token_id_capture.config import TokenIdCaptureSettings
from token_id_capture.consumer import build_from_source, record_build
from token_id_capture.errors import CorruptCaptureError, RolloutRetiredError, TokenCaptureError, UnknownRolloutError
from token_id_capture.finalize.carried import build_of_carried_tokens
from token_id_capture.finalize.earlier_rows import settle
from token_id_capture.finalize.line_reader import LineReader
from token_id_capture.finalize.publication import RowsOutput, StoppedError
from token_id_capture.finalize.row_file import RowFile
from token_id_capture.finalize.row_format import MaskedRows, RowFormat
from token_id_capture.finalize.row_pipe import RowPipe
from token_id_capture.finalize.rows import RolloutLine, read_line, read_row, record_rows, trajectory_rows
from token_id_capture.finalize.source import RolloutSource
from token_id_capture.finalize.totals import Totals
from token_id_capture.integrations.nemo_gym import rollout_carries_token_ids, scored_answer
from token_id_capture.lifecycle import Outcome, Sequences, State
from token_id_capture.rebuild import Build, SnapshotRef, build_snapshot, unneeded_build

# Each rollout in flight holds its tokens and its row in memory; the store commits what waits together.
IN_FLIGHT: Final = 16


@dataclass(frozen=True)
class Plan:
    """What to write where. Of ``settings``, the configuration block, the limits of masked rows say when to stop.

    ``rollouts`` are those that are wanted, by default every one that has a record; ``opened_since`` in seconds since
    the epoch. Without ``from_records`` the input only names them.
    """

    output: RowsOutput
    row_format: RowFormat = RowFormat.RECORD
    retire: bool = False
    id_field: str | None = None
    sequences: Sequences = Sequences.MAIN
    masked: MaskedRows = MaskedRows.KEEP
    models: tuple[str, ...] | None = None
    rollouts: frozenset[str] = frozenset()
    opened_since: float | None = None
    from_records: bool = True
    settings: TokenIdCaptureSettings = field(default_factory=TokenIdCaptureSettings)


@dataclass(frozen=True)
class _Made:
    """What was made of one record.

    ``row`` is None if the output has it already. ``build`` is what the row tells. ``unneeded`` is the capture
    of a record that brought its tokens along, or that was delivered before. ``error``: the store refused it.
    """

    row: bytes | None = None
    build: Build | None = None
    unneeded: Build | None = None
    error: Exception | None = None

    @property
    def masked(self) -> bool:
        return self.build is not None and not self.build.deliverable

    @property
    def is_of_unknown_rollout(self) -> bool:
        """Whether the row is masked since the database has nothing of the rollout."""
        build = self.build
        return build is not None and build.reason == reasons.NOTHING_RECORDED and build.is_of_unknown_rollout

    @property
    def handed_on(self) -> Build | None:
        """The build whose snapshot is delivered with the row."""
        return None if self.masked else self.unneeded or self.build


class Finalizer:
    """One run over ``source``. ``show`` gets the number of input bytes that are done, ``report`` each
    line about a single record."""

    def __init__(
        self, plan: Plan, source: RolloutSource, show: Callable[[int], None], report: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._show = show
        self._report = report
        self._totals = Totals()
        self._line_of: dict[str, int] = {}
        self._source = source
        self._rows: RowFile | RowPipe

    async def run(self, stream: BinaryIO) -> Totals:
        """Finalize every record of the stream.

        Raises:
            TokenCaptureError: the database, the input or the output cannot be used.
        """
        plan = self._plan
        # What the library logs of single rollouts is reported here, with the line of the input.
        logging.getLogger("token_id_capture").addHandler(logging.NullHandler())
        async with self._source:
            read = partial(read_row, row_format=plan.row_format, id_field=plan.id_field)
            with plan.output.opened(read) as self._rows:
                if isinstance(self._rows, RowFile) and plan.output.is_durable:
                    await settle(self._rows, self._source)
                await self._run_batches(LineReader(stream, IN_FLIGHT))
                if self._totals.stopped is None:
                    self._look_for_records()
                    self._totals.files = await self._publish()
        return self._totals

    async def _run_batches(self, lines: LineReader) -> None:
        self._stop_on_signals(lines)
        done = 0
        while self._totals.stopped is None and (batch := await lines.batch()):
            read = [line for number, raw in batch if (line := self._read(number, raw))]
            await self._run_batch([line for line in read if await self._is_meant(line)])
            done += sum(len(raw) for _, raw in batch)
            self._show(done)

    def _stop_on_signals(self, lines: LineReader) -> None:
        loop = asyncio.get_running_loop()

        def stop(number: int) -> None:
            self._totals.signal = number
            self._totals.stopped = "interrupted: run the same command again"
            self._totals.stopped += " to continue" if self._plan.output.is_durable else ""
            lines.stop()
            # A second signal does not wait for the rows in flight.
            loop.remove_signal_handler(number)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)

    def _read(self, number: int, raw: bytes) -> RolloutLine | None:
        if not raw.strip():
            return None
        self._totals.lines += 1
        try:
            line = read_line(number, raw, self._plan.id_field)
            first = self._line_of.setdefault(line.rollout_id, number)
            if first != number:
                raise ValueError(f"rollout {line.rollout_id!r} is already in line {first}")
        except ValueError as error:
            self._totals.refused += 1
            self._report(f"line {number} is refused: {error}")
            return None
        return line if not self._plan.rollouts or line.rollout_id in self._plan.rollouts else None

    async def _is_meant(self, line: RolloutLine) -> bool:
        """Whether a record, or an id without one, is of a rollout that is wanted."""
        plan = self._plan
        if plan.opened_since is None and plan.from_records:
            return True
        try:
            opened_at = (await self._source.describe_rollout(line.rollout_id)).summary.opened_at
        except UnknownRolloutError:
            if plan.from_records:
                return True  # its row says so
            self._totals.unknown += 1
            self._report(
                f"no rollout {line.rollout_id!r} is in this database, and there is no file of this name: check the id "
                "and --database"
            )
            return False
        if plan.opened_since is not None and opened_at < plan.opened_since:
            self._totals.before += 1
            return False
        return True

    def _look_for_records(self) -> None:
        for rollout_id in sorted(self._plan.rollouts - self._line_of.keys()):
            self._totals.without_record += 1
            self._report(f"no record belongs to rollout {rollout_id!r}: check the id and the records")

    async def _publish(self) -> list[str]:
        """Make the output of the rows, if they are not in it already."""
        rows, output = self._rows, self._plan.output
        if not isinstance(rows, RowFile) or output.grows:
            return []
        stopped = lambda: self._totals.stopped is not None  # noqa: E731
        try:
            return await asyncio.to_thread(output.publish, rows, self._plan.row_format, stopped)
        except StoppedError:
            return []

    async def _run_batch(self, lines: list[RolloutLine]) -> None:
        made = await asyncio.gather(*map(self._prepare, lines))
        ready: list[tuple[RolloutLine, _Made]] = []
        for line, one in zip(lines, made, strict=True):
            if self._is_unavailable(line, one):
                break
            if one.row is None:
                self._totals.already_there += 1
            else:
                self._rows.append(one.row)
                self._count(line, one)
            ready.append((line, one))
            if self._too_many_masked():
                break
        if isinstance(self._rows, RowPipe):
            await self._rows.drain()
            return
        if not self._plan.output.is_durable:
            return
        self._rows.sync()
        await asyncio.gather(*(self._hand_on(line, one) for line, one in ready))

    async def _prepare(self, line: RolloutLine) -> _Made:
        """Build a rollout and the row to write first; nothing is deleted or written yet."""
        if line.rollout_id in self._rows.delivered:
            return await self._delivered_before(line)
        if rollout_carries_token_ids(line.record):
            return await self._passed_on(line)
        plan = self._plan
        write = record_rows if plan.row_format is RowFormat.RECORD else trajectory_rows
        scored = scored_answer(line.record)
        build_with = partial(build_snapshot, sequences=plan.sequences, models=plan.models, scored=scored)
        build, row = await build_from_source(
            line.rollout_id, self._source, partial(write, line, masked=plan.masked), build_with
        )
        return _Made(row, build, error=build.error if build.reason == reasons.FREEZE_FAILED else None)

    async def _passed_on(self, line: RolloutLine) -> _Made:
        """A record that carries what the policy sampled needs nothing of its capture, which is frozen."""
        unneeded, error = None, None
        try:
            snapshot = await self._source.freeze(line.rollout_id)
            unneeded = unneeded_build(snapshot) if snapshot.snapshot_id else None
        except Exception as failure:
            error = failure
        if self._plan.row_format is RowFormat.RECORD:
            return _Made(line.raw.rstrip(b"\r\n") + b"\n", None, unneeded, error)
        # If these tokens are of no use, the capture may be all that is left of the rollout: it is kept.
        carried = build_of_carried_tokens(line.rollout_id, line.record)
        row = trajectory_rows(line, carried, self._plan.masked, unneeded.snapshot if unneeded is not None else None)
        return _Made(row, carried, unneeded, error)

    def _is_unavailable(self, line: RolloutLine, made: _Made) -> bool:
        """Whether the database, not the rollout, prevented the build; then this run ends."""
        gone = made.is_of_unknown_rollout or (made.masked and isinstance(made.error, RolloutRetiredError))
        if gone and self._plan.output.replaces:
            self._totals.stopped = (
                f"stopped at line {line.number}: rollout {line.rollout_id!r} is not in this database any more, and "
                f"{self._plan.output.destination.output} may hold its only row: name another output, or remove that one"
            )
            return True
        if made.error is None or isinstance(made.error, CorruptCaptureError | RolloutRetiredError):
            return False
        self._totals.stopped = f"stopped at line {line.number}: {made.error}"
        return True

    def _count(self, line: RolloutLine, made: _Made) -> None:
        build = made.build
        if made.row:
            self._totals.written += 1
            self._totals.rows += 1 if build is None else max(1, len(build.rows))
        else:
            self._totals.dropped += 1
        if build is not None and self._plan.sequences is Sequences.ALL:
            self._totals.causes.update(row.cause.value for row in build.rows if row.cause is not None)
        if build is None or build.deliverable:
            return
        self._totals.masked += 1
        self._totals.reasons[build.reason] += 1
        if self._plan.sequences is Sequences.MAIN and build.reason in SPLIT_BY_CAUSE:
            self._totals.causes.update(build.metrics["causes"])
        if made.error is not None:
            self._totals.not_frozen += 1
            self._report(f"line {line.number}: its row is masked: {made.error}")
        elif made.is_of_unknown_rollout:
            self._totals.unknown += 1
            self._report(
                f"line {line.number}: no rollout {line.rollout_id!r} is in this database, so its row is masked: "
                "check the id and --database"
            )

    def _too_many_masked(self) -> bool:
        settings, totals = self._plan.settings, self._totals
        built, masked = totals.written + totals.dropped, totals.masked
        if not settings.too_many_masked(masked, built):
            return False
        self._totals.stopped = (
            f"stopped: {masked} of {built} rollouts are masked, more than --max-mask-fraction "
            f"{settings.max_mask_fraction:g} allows"
        )
        return True

    async def _delivered_before(self, line: RolloutLine) -> _Made:
        """What the row of an earlier run was built from, if its rollout is still to be delivered."""
        row = self._rows.delivered[line.rollout_id]
        if row.masked:
            return _Made()
        if not row.snapshot_id:
            # Only the redundant capture of a record that was passed on as it is can be left.
            return replace(await self._passed_on(line), row=None) if rollout_carries_token_ids(line.record) else _Made()
        try:
            now = (await self._source.describe_rollout(line.rollout_id)).summary
        except UnknownRolloutError:
            return _Made()
        if now.state == State.RETIRED:
            return _Made()
        if (now.snapshot_id, now.version) != (row.snapshot_id, row.version):
            self._not_retired(line, "it changed since its row was written")
            return _Made()
        snapshot = SnapshotRef(line.rollout_id, row.snapshot_id, row.version)
        return _Made(unneeded=Build(line.rollout_id, snapshot, Outcome.DELIVERABLE))

    async def _hand_on(self, line: RolloutLine, made: _Made) -> None:
        """The row is durable: say so in the store, and delete the capture if that is wanted."""
        build = made.handed_on
        if build is None or build.snapshot is None or not build.snapshot.snapshot_id:
            return
        await record_build(self._source, build, Outcome.DELIVERED)
        if not self._plan.retire:
            return
        ref = build.snapshot
        try:
            dropped = await self._source.drop(ref.rollout_id, snapshot_id=ref.snapshot_id, version=ref.version)
        except TokenCaptureError as error:
            self._not_retired(line, str(error))
            return
        if dropped:
            self._totals.retired += 1
        else:
            self._not_retired(line, "it changed after it was frozen")

    def _not_retired(self, line: RolloutLine, why: str) -> None:
        self._totals.not_retired += 1
        self._report(
            f"line {line.number}: rollout {line.rollout_id!r} was not retired: {why}; see tokcap show {line.rollout_id}"
        )
