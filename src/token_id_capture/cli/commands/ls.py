"""``tokcap ls``: the rollouts of a database, one a line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from token_id_capture.cli.options import (
    DatabaseOption,
    JsonOption,
    print_json,
    report,
)
from token_id_capture.cli.output.database import reading
from token_id_capture.cli.output.tables import print_table
from token_id_capture.cli.output.units import SinceOption, since_option
from token_id_capture.lifecycle import State

if TYPE_CHECKING:
    from token_id_capture.store import RolloutSummary

HEADERS = ("rollout", "state", "calls", "agents", "prompt", "sampled", "flags", "outcome")

_MOST = 2**31
"""SQLite takes no number of any length."""


def ls(
    database: DatabaseOption,
    limit: Annotated[int, typer.Option("--limit", "-n", metavar="N", min=1, help="Show at most this many.")] = 50,
    after: Annotated[str, typer.Option("--after", metavar="ID", help="Start after this rollout id.")] = "",
    state: Annotated[
        State | None, typer.Option("--state", metavar="open|frozen|retired", help="Only rollouts in this state.")
    ] = None,
    masked: Annotated[
        bool, typer.Option("--masked", help="Only those whose latest outcome is masked or failed.")
    ] = False,
    incomplete: Annotated[bool, typer.Option("--incomplete", help="Only those with a flag or an open call.")] = False,
    since: SinceOption = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="Only those with a call of this model.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the rollouts of a database by their ids.

    Shows the state, calls, agents, lengths, missing calls and outcome of each. prompt is the longest prompt and
    sampled is what all calls generated, both in tokens. flags are the reasons that make the rollout incomplete,
    followed by + and the number of calls that were begun and never ended.
    """
    from token_id_capture.store.read.listing import RolloutFilter, list_rollouts

    wanted = RolloutFilter(
        state=state,
        masked=masked,
        incomplete=incomplete,
        opened_since=None if since is None else since_option(since),
        model=model,
    )
    with reading(database) as connection:
        summaries = list_rollouts(connection.execute, after, min(limit, _MOST) + 1, wanted)
    more, summaries = len(summaries) > limit, summaries[:limit]
    if json:
        print_json(summaries)
    else:
        print_table(HEADERS, [_row(summary) for summary in summaries])
    if more:
        report(f"there are more; continue with --after {summaries[-1].rollout_id}")


def _row(summary: RolloutSummary) -> tuple[object, ...]:
    return (
        summary.rollout_id,
        summary.state,
        summary.calls,
        summary.agents,
        summary.prompt_tokens_longest,
        summary.generated_tokens,
        f"{summary.flags}+{summary.open_intents}" if summary.open_intents else summary.flags,
        ": ".join(filter(None, (summary.outcome, summary.reason, summary.causes))),
    )
