"""``tokcap prune``: forget what is old."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from token_id_capture.cli.options import DatabaseOption, confirm, fail, report
from token_id_capture.cli.output.progress import progress_bar
from token_id_capture.cli.output.tables import print_table
from token_id_capture.cli.output.units import parse_duration, plural

if TYPE_CHECKING:
    from token_id_capture.store.maintain.pruning import Old


def prune(
    database: DatabaseOption,
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="AGE", help="How old, as in 90m, 36h or 14d.")
    ] = "14d",
    evidence: Annotated[
        bool, typer.Option("--evidence", help="Masked and failed rollouts too, with all their captures.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")] = False,
) -> None:
    """Delete old tombstones and, on request, old evidence.

    Deletes tombstones of retired rollouts (they refuse late writers), outcomes and late writes of deleted rollouts,
    and processes that ended and that nothing refers to. --evidence also deletes masked and failed rollouts whose
    outcome is that old; their release stays recorded. It never touches rollouts that are open or frozen without an
    outcome. It asks before it deletes anything, and others may write meanwhile.
    """
    from token_id_capture.store.maintain import pruning
    from token_id_capture.store.reading import location_of

    try:
        seconds = parse_duration(older_than)
    except ValueError as error:
        fail(f"--older-than: {error}")
    location = location_of(database)
    old = pruning.find_old(location, seconds)
    _print(old, evidence)
    if not (old.anything or (evidence and old.evidence)):
        report(f"nothing is older than {older_than}")
        return
    if dry_run:
        return
    confirm("Remove these?", yes)
    with progress_bar() as show:
        pruned = pruning.prune(
            location, old, with_evidence=evidence, note=f"older than {older_than.strip()}", progress=show
        )
    report(
        f"removed {plural(pruned.tombstones, 'tombstone')}, {plural(pruned.outcomes, 'outcome')}, "
        f"{plural(pruned.late_writes, 'late write')}, {plural(pruned.writers, 'process', 'processes')} and "
        f"{plural(pruned.evidence, 'rollout')} of evidence"
        f"{'; tokcap vacuum gives their space back' if pruned.evidence and isinstance(location, Path) else ''}"
    )


def _print(old: Old, evidence: bool) -> None:
    rows: list[tuple[object, ...]] = [
        ("tombstones of retired rollouts", old.tombstones, ""),
        ("outcomes of rollouts that are gone", old.outcomes, ""),
        ("late writes to rollouts that are gone", old.late_writes, ""),
        ("processes that no row refers to", len(old.writers), ""),
        (
            f"masked and failed rollouts{'' if evidence else ' (kept without --evidence)'}",
            len(old.evidence),
            ", ".join(f"{reason or 'no reason'} {count:,}" for reason, count in old.evidence_reasons.most_common(5)),
        ),
    ]
    print_table(("what", "how many", "reasons"), rows)
