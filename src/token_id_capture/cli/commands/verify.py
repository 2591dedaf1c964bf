"""``tokcap verify``: whether everything is still as it was stored."""

from __future__ import annotations

import typer

from token_id_capture.cli.options import (
    EXIT_PARTIAL,
    DatabaseOption,
    JsonOption,
    let_others_go_first,
    print_json,
    printable,
    report,
)
from token_id_capture.cli.output.progress import progress_bar
from token_id_capture.cli.output.totals_text import checked_in_words
from token_id_capture.cli.output.units import plural

_MOST_LISTED = 10_000


def verify(database: DatabaseOption, json: JsonOption = False) -> None:
    """Check what is stored against its digests.

    Checks the structure of a file, every reference, the tokens, log probabilities, content and continued call of
    every call, and that every snapshot is whole. Each damage is reported on one line that names the call. Only reads,
    even while others write. Exit code 0: everything is as it was stored; 1: something is damaged; 2: the database
    cannot be read.
    """
    from token_id_capture.store.maintain import verification
    from token_id_capture.store.reading import location_of

    let_others_go_first()
    checked, listed, damaged = verification.Checked(), [], 0
    with progress_bar() as show:
        for damage in verification.verify(location_of(database), checked, show):
            damaged += 1
            if not json:
                print(printable(str(damage)), flush=True)
            elif damaged <= _MOST_LISTED:
                listed.append(damage)
    if json:
        print_json({"damaged": damaged, "damages": listed, "checked": checked})
    report(f"{checked_in_words(checked)}: {plural(damaged, 'damage') if damaged else 'no damage'}")
    if damaged:
        raise typer.Exit(EXIT_PARTIAL)
