"""``tokcap copy``: rollouts go from one database to another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from token_id_capture.cli.options import (
    EXIT_INTERRUPTED,
    EXIT_PARTIAL,
    JsonOption,
    fail,
    let_others_go_first,
    print_json,
    report,
)
from token_id_capture.cli.output.evidence import rollout_argument
from token_id_capture.cli.output.progress import progress_bar
from token_id_capture.cli.output.units import plural

if TYPE_CHECKING:
    from token_id_capture.store.copying.run import Copied

_LISTED = 20


def copy(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="The database to copy from, named as for --database.")
    ],
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="The database to copy to; it is made if it is missing.")
    ],
    rollouts: Annotated[
        list[str] | None, typer.Argument(metavar="[ROLLOUT]...", help="The rollouts to copy; by default all.")
    ] = None,
    include_open: Annotated[
        bool,
        typer.Option(
            "--include-open",
            help="Also copy rollouts that are not frozen, as they are now; only safe once nobody writes to them.",
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Copy rollouts from one database to another, exactly.

    Copies calls, intents, flags, snapshots with their ids and versions, outcomes, late writes and tombstones, with
    their times and order. Each call is checked against its digests on the way. A rollout is in the target whole or
    not at all, so after an interruption the same command completes the copy. The source and the rollouts that the
    target already has never change. Others may write both databases meanwhile. Open rollouts are left out, because
    the copy would miss their later calls. Exit code 1: some were left out because they are open, damaged, not in the
    source or different in the target; 2: a database cannot be used.
    """
    from token_id_capture.store.copying.databases import copy_database
    from token_id_capture.store.copying.run import Copied

    let_others_go_first()
    wanted = [rollout_argument(rollout_id) for rollout_id in rollouts or ()]
    copied = Copied()
    try:
        with progress_bar() as show:
            copy_database(source, target, wanted, include_open=include_open, copied=copied, progress=show)
    except KeyboardInterrupt:
        fail(f"interrupted: {_done(copied)}; the same command copies the rest", EXIT_INTERRUPTED)
    if json:
        print_json(copied)
    else:
        report(_done(copied))
        _say_left_out(copied)
    if not copied.complete:
        raise typer.Exit(EXIT_PARTIAL)


def _done(copied: Copied) -> str:
    there = f", {copied.already_there:,} already there" if copied.already_there else ""
    return f"copied {plural(copied.copied, 'rollout')} of {plural(copied.calls, 'call')}{there}"


def _say_left_out(copied: Copied) -> None:
    _list(copied.open_rollouts, "not frozen: finalize them first, or use --include-open once nobody writes to them")
    _list(
        copied.conflicts,
        "different in the target, which is unchanged: delete them there with tokcap delete, then copy again",
    )
    _list(copied.absent, "not in the source: tokcap ls lists its rollouts")
    for damage in copied.damaged[:_LISTED]:
        report(f"damaged and left out: {damage}")
    if len(copied.damaged) > _LISTED:
        report(f"and {len(copied.damaged) - _LISTED:,} more; tokcap verify lists every damage")


def _list(rollout_ids: Sequence[str], why: str) -> None:
    if rollout_ids:
        more = f" and {len(rollout_ids) - _LISTED:,} more (--json lists them all)" if len(rollout_ids) > _LISTED else ""
        report(f"{len(rollout_ids):>6,} {why}: {', '.join(rollout_ids[:_LISTED])}{more}")
