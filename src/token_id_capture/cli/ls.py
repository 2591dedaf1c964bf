"""``tokcap ls``: the rollouts of a database, one a line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from token_id_capture.cli.common import (
    DatabaseOption,
    JsonOption,
    existing_store,
    print_json,
    print_table,
    report,
    run,
)

if TYPE_CHECKING:
    from pathlib import Path

    from token_id_capture.store.queries import RolloutSummary

HEADERS = ("rollout", "state", "version", "calls", "prompt", "generated", "flags", "open", "outcome", "reason")


def ls(
    database: DatabaseOption,
    limit: Annotated[int, typer.Option("--limit", "-n", metavar="N", min=1, help="Show at most this many.")] = 50,
    after: Annotated[str, typer.Option("--after", metavar="ID", help="Go on after this rollout id.")] = "",
    json: JsonOption = False,
) -> None:
    """List the rollouts of a database by their ids.

    Each with its state, calls and lengths, what is missing and what became of it: prompt is the longest
    prompt and generated the sum of all calls, in tokens; flags are reasons that make the rollout
    incomplete, and open are calls that were begun and never ended.
    """
    summaries = run(_list(database, after, limit + 1))
    more, summaries = len(summaries) > limit, summaries[:limit]
    if json:
        print_json(summaries)
    else:
        print_table(HEADERS, [_row(summary) for summary in summaries])
    if more:
        report(f"there are more; go on with --after {summaries[-1].rollout_id}")


async def _list(database: Path, after: str, limit: int) -> list[RolloutSummary]:
    async with existing_store(database) as store:
        return await store.list_rollouts(after, limit)


def _row(summary: RolloutSummary) -> tuple[object, ...]:
    return (
        summary.rollout_id,
        summary.state,
        summary.version,
        summary.calls,
        summary.prompt_tokens_longest,
        summary.generated_tokens,
        summary.flags,
        summary.open_intents,
        summary.outcome,
        summary.reason,
    )
