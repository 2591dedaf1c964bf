"""``tokcap delete``: rollouts go, whatever their state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from token_id_capture.cli.options import EXIT_PARTIAL, DatabaseOption, confirm, existing_store, report, run
from token_id_capture.cli.output.database import reading
from token_id_capture.cli.output.evidence import rollout_argument
from token_id_capture.cli.output.tables import print_table
from token_id_capture.cli.output.units import plural

if TYPE_CHECKING:
    from token_id_capture.store import RolloutSummary


def delete(
    rollouts: Annotated[
        list[str], typer.Argument(metavar="ROLLOUT...", help="The rollout ids, as tokcap ls shows them.")
    ],
    database: DatabaseOption,
    keep_tombstone: Annotated[
        bool, typer.Option("--keep-tombstone", help="Retire them instead: their ids stay closed for late writes.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete rollouts whatever their state, before their ids are used again.

    Deletes everything captured, including the evidence of masked rollouts. The audit trail records the deletion.
    Shows the rollouts and asks first. Run it before you use a rollout id again; otherwise the new rollout continues
    the old one or is refused. Exit code 1: some of the ids are not in the database.
    """
    from token_id_capture.store.reading import location_of

    wanted = list(dict.fromkeys(map(rollout_argument, rollouts)))
    found = _look_up(database, wanted)
    absent = [rollout_id for rollout_id in wanted if rollout_id not in found]
    if found:
        print_table(
            ("rollout", "state", "calls", "outcome", "reason"),
            [(one.rollout_id, one.state, one.calls, one.outcome, one.reason) for one in found.values()],
        )
        confirm(f"Delete {'this' if len(found) == 1 else 'these'}?", yes)
        removed = run(_remove(database, list(found), keep_tombstone))
        report(f"{'retired' if keep_tombstone else 'deleted'} {plural(len(removed), 'rollout')}")
    for rollout_id in absent:
        report(f"no rollout {rollout_id!r} is in {location_of(database)}: tokcap ls lists them")
    if absent:
        raise typer.Exit(EXIT_PARTIAL)


def _look_up(database: str, rollout_ids: Sequence[str]) -> dict[str, RolloutSummary]:
    from token_id_capture.store.read.queries import summaries_of

    with reading(database) as connection:
        return {one.rollout_id: one for one in summaries_of(connection.execute, rollout_ids)}


async def _remove(database: str, rollout_ids: Sequence[str], keep_tombstone: bool) -> list[str]:
    async with existing_store(database) as store:
        changed = await (store.retire if keep_tombstone else store.delete)(rollout_ids)
    return changed["removed"]
