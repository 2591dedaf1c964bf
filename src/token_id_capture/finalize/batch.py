"""The work of ``tokcap finalize``, a batch of rollouts at a time.

One batch: freeze and build together, write the rows in the order of the input, make them durable
with one ``fsync``, and only then hand the rollouts on.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

from token_id_capture import reasons
from token_id_capture.consumer import (
    MASK_SAMPLE_KEY,
    SNAPSHOT_KEY,
    Build,
    trajectories_from_source,
    unusable_build,
)
from token_id_capture.delivery import (
    TOKEN_CAPTURE_KEY,
    build_of_record,
    capture_build_can_retire,
    finalize_rollout_token_capture,
    record_delivery,
    retire_rollout_token_capture,
    rollout_carries_token_ids,
)
from token_id_capture.errors import CorruptCaptureError, RolloutRetiredError, UnknownRolloutError
from token_id_capture.finalize.earlier_rows import settle
from token_id_capture.finalize.line_reader import LineReader
from token_id_capture.finalize.row_file import RowFile
from token_id_capture.finalize.row_format import RowFormat
from token_id_capture.finalize.rows import (
    RolloutLine,
    read_line,
    read_row,
    record_row,
    trajectory_row,
)
from token_id_capture.finalize.sources import CarriedTokens, WatchedStore
from token_id_capture.finalize.totals import Totals
from token_id_capture.store import TokenCaptureStore

# Each rollout in flight holds its tokens and its row in memory; the store commits what waits together.
IN_FLIGHT: Final = 16


@dataclass(frozen=True)
class Plan:
    """What to write where, and when to stop."""

    output: Path
    row_format: RowFormat
    retire: bool
    max_mask_fraction: float | None
    mask_fraction_min_samples: int
    id_field: str | None


class Finalizer:
    """One run over ``store``. ``show`` gets the number of input bytes that are done, ``report`` each
    line about a single record."""

    def __init__(
        self, plan: Plan, store: TokenCaptureStore, show: Callable[[int], None], report: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._show = show
        self._report = report
        self._totals = Totals()
        self._line_of: dict[str, int] = {}
        self._store = store
        self._source = WatchedStore(store)
        self._rows: RowFile

    async def run(self, stream: BinaryIO) -> Totals:
        """Finalize every record of the stream.

        Raises:
            TokenCaptureError: the database, the input or the output cannot be used.
        """
        plan = self._plan
        # What the library logs of single rollouts is reported here, with the line of the input.
        logging.getLogger("token_id_capture").addHandler(logging.NullHandler())
        async with self._store:
            read = partial(read_row, row_format=plan.row_format, id_field=plan.id_field)
            with RowFile(plan.output, read) as self._rows:
                await settle(self._rows, self._store)
                await self._run_batches(LineReader(stream, IN_FLIGHT))
        return self._totals

    async def _run_batches(self, lines: LineReader) -> None:
        self._stop_on_signals(lines)
        done = 0
        while self._totals.stopped is None and (batch := await lines.batch()):
            await self._run_batch([line for number, raw in batch if (line := self._read(number, raw))])
            done += sum(len(raw) for _, raw in batch)
            self._show(done)

    def _stop_on_signals(self, lines: LineReader) -> None:
        loop = asyncio.get_running_loop()

        def stop(number: int) -> None:
            self._totals.signal = number
            self._totals.stopped = "interrupted: run the same command again to go on"
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
                raise ValueError(f"rollout {line.rollout_id!r} stands in line {first} already")
        except ValueError as error:
            self._totals.refused += 1
            self._report(f"line {number} is refused: {error}")
            return None
        return line

    async def _run_batch(self, lines: list[RolloutLine]) -> None:
        made = await asyncio.gather(*map(self._prepare, lines))
        ready: list[tuple[RolloutLine, Build | None]] = []
        for line, (built, row) in zip(lines, made, strict=True):
            if self._is_unavailable(line):
                break
            if row is None:
                self._totals.already_there += 1
            else:
                self._rows.append(row)
                self._count(line, built)
            ready.append((line, built))
            if self._too_many_masked():
                break
        self._rows.sync()
        await asyncio.gather(*(self._hand_on(line, built) for line, built in ready))

    async def _prepare(self, line: RolloutLine) -> tuple[Build | None, bytes | None]:
        """The build to hand on and the row to write first; no row if it stands in the output."""
        if line.rollout_id in self._rows.delivered:
            return await self._earlier_build(line), None
        return await self._make(line)

    async def _make(self, line: RolloutLine) -> tuple[Build | None, bytes]:
        """Build a rollout and its row; nothing is deleted or written yet."""
        flat = self._plan.row_format is RowFormat.TRAJECTORY
        built = await finalize_rollout_token_capture(
            line.record,
            self._source,
            rollout_id=line.rollout_id,
            projection="trajectory" if flat else "response",
        )
        if not flat:
            return built, record_row(line)
        snapshot = built.get(SNAPSHOT_KEY) if built else None
        if built is not None and not rollout_carries_token_ids(line.record):
            return built, trajectory_row(line, built, snapshot)
        carried = await _carried_build(line)
        # The capture may be all that is left of a record whose own tokens are of no use.
        hand_on = carried if carried[MASK_SAMPLE_KEY] else built
        return hand_on, trajectory_row(line, carried, snapshot)

    def _is_unavailable(self, line: RolloutLine) -> bool:
        """Whether the database, not the rollout, is why there is no build; then this run ends."""
        error = self._source.failures.get(line.rollout_id)
        if error is None or isinstance(error, CorruptCaptureError | RolloutRetiredError):
            return False
        self._totals.stopped = f"stopped at line {line.number}: {error}"
        return True

    def _count(self, line: RolloutLine, built: Build | None) -> None:
        self._totals.written += 1
        if built is None or not built[MASK_SAMPLE_KEY]:
            return
        self._totals.masked += 1
        self._totals.reasons[built["reason"]] += 1
        if line.rollout_id in self._source.failures:
            self._totals.not_frozen += 1
            self._report(f"line {line.number}: its row is masked: {self._source.failures[line.rollout_id]}")
        elif built["reason"] == reasons.NOTHING_RECORDED and not built[SNAPSHOT_KEY]["snapshot_id"]:
            self._totals.unknown += 1
            self._report(
                f"line {line.number}: no rollout {line.rollout_id!r} is in this database, so its row is masked: "
                "check the id and --database"
            )

    def _too_many_masked(self) -> bool:
        limit = self._plan.max_mask_fraction
        written, masked = self._totals.written, self._totals.masked
        if limit is None or written < self._plan.mask_fraction_min_samples or masked <= limit * written:
            return False
        self._totals.stopped = (
            f"stopped: {masked} of {written} rollouts are masked, more than --max-mask-fraction {limit:g} allows"
        )
        return True

    async def _earlier_build(self, line: RolloutLine) -> Build | None:
        """What the row of an earlier run was built from, if its rollout is still to be handed on."""
        row = self._rows.delivered[line.rollout_id]
        if row.masked:
            return None
        if not row.snapshot_id:
            # Only the redundant capture of a record that was passed on as it is can be left.
            carries = rollout_carries_token_ids(line.record)
            return (await self._make(line))[0] if carries else None
        try:
            now = (await self._store.describe_rollout(line.rollout_id)).summary
        except UnknownRolloutError:
            return None
        if now.state == "retired":
            return None
        if (now.snapshot_id, now.version) != (row.snapshot_id, row.version):
            self._not_retired(line, "it changed since its row was written")
            return None
        named = {"rollout_id": line.rollout_id, "snapshot_id": row.snapshot_id, "version": row.version}
        return build_of_record({TOKEN_CAPTURE_KEY: named})

    async def _hand_on(self, line: RolloutLine, built: Build | None) -> None:
        """The row is durable: say so in the store, and delete the capture if that is wanted."""
        if built is None or not capture_build_can_retire(built):
            return
        if not self._plan.retire:
            await record_delivery(self._source, built)
        elif await retire_rollout_token_capture(line.rollout_id, self._source, built):
            self._totals.retired += 1
        else:
            self._not_retired(line, "it changed after it was frozen")

    def _not_retired(self, line: RolloutLine, why: str) -> None:
        self._totals.not_retired += 1
        self._report(
            f"line {line.number}: rollout {line.rollout_id!r} was not retired, for {why}; "
            f"see tokcap show {line.rollout_id}"
        )


async def _carried_build(line: RolloutLine) -> Build:
    """The sequence of a record that carries its own token ids."""
    try:
        carried = CarriedTokens(line.rollout_id, line.record)
    except ValueError as error:
        return unusable_build(line.rollout_id, f"{reasons.BUILD_FAILED}: {error}")
    return await trajectories_from_source(line.rollout_id, carried, projection="trajectory")
