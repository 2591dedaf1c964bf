"""``tokcap report``: a page to look at."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from token_id_capture.cli.options import DatabaseOption, fail
from token_id_capture.cli.options import report as say
from token_id_capture.cli.output.database import database_file
from token_id_capture.cli.output.evidence import rollout_argument, stored_evidence, stored_rollout
from token_id_capture.cli.output.tokenizer import decoder
from token_id_capture.cli.output.units import show_bytes
from token_id_capture.outputs.whole_files import whole_file

if TYPE_CHECKING:
    from token_id_capture.explanation import Decode

_KEPT_EVIDENCE = 100


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
) -> None:
    """Make a page of one rollout, or of all, to look at in a browser.

    Of one rollout: why it is delivered or masked and what to do about it, its tokens coloured by loss mask and log
    probability, the tree of its calls, a timeline, and all that is recorded. Of all: what was delivered and masked
    over time, the reasons, and how many of the sampled tokens were delivered. The page is one file that loads
    nothing, so it can be sent to others. Works on open, frozen, masked and retired rollouts, and changes nothing.
    """
    if every is (rollout is not None):
        fail("name one rollout, or say --all for all of them")
    # What a build logs is part of what the page shows.
    logging.getLogger("token_id_capture").addHandler(logging.NullHandler())
    html = _overview(database) if rollout is None else _rollout(database, rollout, tokenizer)
    with whole_file(output, may_replace=_is_report) as stream:
        stream.write(html.encode())
    say(f"wrote {output}, {show_bytes(output.stat().st_size)}")


def _rollout(database: str, rollout_id: str, tokenizer: Path | None) -> str:
    from token_id_capture.explanation import explain
    from token_id_capture.report.render import render_rollout
    from token_id_capture.report.rollout_page import rollout_page

    decode: Decode | None = None if tokenizer is None else decoder(tokenizer)
    evidence = stored_evidence(database, rollout_argument(rollout_id))
    explained = explain(stored_rollout(evidence), decode)
    return render_rollout(rollout_page(evidence, explained, time.time(), decode))


def _overview(database: str) -> str:
    from token_id_capture.report.charts import cut
    from token_id_capture.report.overview_page import History, overview_page
    from token_id_capture.report.render import render_overview
    from token_id_capture.store.file.read_only import read_only
    from token_id_capture.store.read import history

    path = database_file(database)
    with read_only(path) as connection:
        span = history.outcome_span(connection)
        slots = None if span is None else cut(*span)
        kept = history.kept_evidence(connection, _KEPT_EVIDENCE + 1)
        read = History(
            database=path.name,
            made_at=time.time(),
            slots=slots,
            outcomes=[] if slots is None else history.outcome_counts(connection, slots.start, slots.width),
            states=history.state_counts(connection),
            causes=history.cause_counts(connection),
            flags=history.flag_counts(connection),
            open_calls=history.open_calls(connection),
            kept=kept[:_KEPT_EVIDENCE],
            more_kept=len(kept) > _KEPT_EVIDENCE,
        )
    return render_overview(overview_page(read))


def _is_report(path: Path) -> bool:
    """Whether the file is a page of this command, so that nothing is lost if it is replaced."""
    from token_id_capture.report.render import MARK

    with path.open("rb") as stream:
        return MARK.encode() in stream.read(256)
