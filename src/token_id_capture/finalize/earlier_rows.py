"""What an interrupted run left in the output, brought into a state that the next one can rely on.

A run records a delivery only after an fsync, so a row is certainly on disk if the store knows that its
rollout was delivered, and so is every row before it.
"""

from __future__ import annotations

from token_id_capture.errors import UnknownRolloutError
from token_id_capture.finalize.row_file import RowFile
from token_id_capture.finalize.source import RolloutSource
from token_id_capture.lifecycle import Outcome, State
from token_id_capture.outputs.whole_files import UnusableOutputError


async def settle(rows: RowFile, store: RolloutSource) -> None:
    """Cut off what a loss of power damaged, and write the rows again that nobody knows to be on disk.

    Raises:
        UnusableOutputError: the damage holds a row whose capture is deleted already, or the file
            cannot be written.
        StoreError: the store cannot be read.
    """
    if rows.damage is not None:
        for rollout_id in sorted(rows.damage.named):
            if await _outcome(store, rollout_id) == State.RETIRED:
                raise UnusableOutputError(
                    f"{rows.path} is damaged from line {rows.damage.line} on, and rollout {rollout_id!r}, whose row "
                    "stands there, is retired already: keep the file, and name another one"
                )
        rows.cut_damage()
    rows.write_again(await _certain(rows, store))


async def _certain(rows: RowFile, store: RolloutSource) -> int:
    """How many bytes of the file are certainly on disk. Only rows whose capture may be deleted matter."""
    uncertain = False
    for rollout_id, row in reversed(rows.delivered.items()):
        if row.masked or not row.snapshot_id:
            continue
        if await _outcome(store, rollout_id) in (Outcome.DELIVERED, State.RETIRED):
            return rows.end_of(rollout_id) if uncertain else rows.end
        uncertain = True
    return 0 if uncertain else rows.end


async def _outcome(store: RolloutSource, rollout_id: str) -> State | Outcome | None:
    """``retired``, or the latest outcome of a rollout; None if there is none."""
    try:
        now = (await store.describe_rollout(rollout_id)).summary
    except UnknownRolloutError:
        return None
    return State.RETIRED if now.state == State.RETIRED else now.outcome
