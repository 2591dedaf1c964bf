"""``tokcap report``: a page to look at."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from token_id_capture.cli.options import DatabaseOption, fail
from token_id_capture.cli.options import report as say
from token_id_capture.cli.output.evidence import RecordsOption, rollout_argument, told_in
from token_id_capture.cli.output.tokenizer import vocabulary
from token_id_capture.cli.output.units import show_bytes
from token_id_capture.outputs.whole_files import whole_file

if TYPE_CHECKING:
    from token_id_capture.store.driver import Connection

_LISTED = 1_000


def report(
    database: DatabaseOption,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="PATH", help="The page; an earlier report of this name is replaced."),
    ],
    rollout: Annotated[
        str | None, typer.Argument(metavar="[ROLLOUT]", help="The rollout id, as tokcap ls shows it.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="An overview of all rollouts instead of one.")] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", metavar="PATH", help="The policy's tokenizer.json: show the text of tokens too."),
    ] = None,
    records: RecordsOption = None,
) -> None:
    """Write a page about one rollout, or about all, for a browser.

    For one rollout, it shows the conversation call by call, with tokens coloured by loss and probability, both texts
    where a history diverges, the call tree on a timeline, and why the rollout is delivered or masked and what to do.
    For all, it shows outcomes and causes over time, the yield of tokens, lengths of rollouts and rewards. The page is
    one file that loads nothing, so you can send it to others. tokcap view shows the same, live. Works on open,
    frozen, masked and retired rollouts, and changes nothing.
    """
    from token_id_capture.store.reading import location_of, reading

    if every is (rollout is not None):
        fail("name one rollout, or say --all for all of them")
    # What a build logs is part of what the page shows.
    logging.getLogger("token_id_capture").addHandler(logging.NullHandler())
    location = location_of(database)
    with reading(location) as connection:
        if rollout is None:
            html = _overview(connection, location.name, records)
        else:
            html = _rollout(connection, location.name, rollout_argument(rollout), tokenizer)
    with whole_file(output, may_replace=_is_report) as stream:
        stream.write(html.encode())
    say(f"wrote {output}, {show_bytes(output.stat().st_size)}")


def _rollout(connection: Connection, database: str, rollout_id: str, tokenizer: Path | None) -> str:
    from token_id_capture.report.model import PageData
    from token_id_capture.report.page import render
    from token_id_capture.report.reading import read_rollout

    data = read_rollout(connection, rollout_id, None if tokenizer is None else vocabulary(tokenizer))
    return render(f"Rollout {data.id}: {data.badge}", PageData(database, rollout=data))


def _overview(connection: Connection, database: str, records: Path | None) -> str:
    from token_id_capture.report.model import PageData
    from token_id_capture.report.page import render
    from token_id_capture.report.reading import read_lines, read_overview

    told = told_in(records)
    overview = read_overview(connection, database, told)
    rollouts = read_lines(connection, told, _LISTED)
    return render(f"Captures of {database}", PageData(database, overview=overview, rollouts=rollouts))


def _is_report(path: Path) -> bool:
    """Whether the file is a page of this command, so that nothing is lost if it is replaced."""
    from token_id_capture.report.page import MARK

    with path.open("rb") as stream:
        return MARK.encode() in stream.read(256)
