"""``tokcap demo``: the whole journey on one machine, from agents to training rows, checked to the end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from token_id_capture.cli.options import EXIT_PARTIAL, JsonOption, fail, print_json, report


def demo(
    directory: Annotated[
        Path | None,
        typer.Option(
            "--directory",
            metavar="PATH",
            help="Where the files go: a new or empty directory. Default: a fresh temporary one.",
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep/--no-keep", help="Whether the files stay afterwards.")] = True,
    json: JsonOption = False,
) -> None:
    """Try everything on this machine, in seconds: agents, capture, a crash, training rows.

    Starts a small model that knows its own probabilities, and the gateway with two workers. Eight
    agents talk to it at once; one asks twice, one compacts its history, and one loses its
    worker before it gets a response. Then the rollouts are finalized, and each delivered token is checked against the
    model. Exit code 1 means that something is not as it must be.
    """
    from token_id_capture.cli.demo.processes import DemoFailedError
    from token_id_capture.cli.demo.run import InterruptedDemoError, run_demo

    try:
        finished = run_demo(directory, keep)
    except DemoFailedError as error:
        fail(str(error))
    except InterruptedDemoError as interruption:
        report("interrupted; nothing is left running")
        raise typer.Exit(128 + interruption.signal) from None
    if json:
        print_json(finished.as_dict())
    else:
        finished.print()
    for problem in finished.problems:
        report(problem)
    if finished.problems:
        raise typer.Exit(EXIT_PARTIAL)
