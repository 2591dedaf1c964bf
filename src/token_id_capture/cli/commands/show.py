"""``tokcap show``: all that is known of one rollout."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from token_id_capture.cli.options import (
    DatabaseOption,
    JsonOption,
    local_time,
    print_json,
    printable,
    report,
)
from token_id_capture.cli.output.database import reading
from token_id_capture.cli.output.evidence import rollout_argument
from token_id_capture.cli.output.tables import print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from token_id_capture.explanation import CallTree
    from token_id_capture.store import CallSummary, RolloutDetail
    from token_id_capture.store.driver import Connection


def show(
    rollout: Annotated[str, typer.Argument(metavar="ROLLOUT", help="The rollout id, as tokcap ls shows it.")],
    database: DatabaseOption,
    json: JsonOption = False,
) -> None:
    """Show everything stored about a rollout except its tokens.

    Shows its calls, the call that each continues (shared is the number of tokens in common), and the agent and
    purpose of each, if the harness reports them. A tree shows which calls form the sequence, which were left out as
    retries or copies, and where a prompt starts again. Then follow the flags that make it incomplete, the calls that
    were begun (both with the session headers of the request), its outcome, and late writes.
    """
    from token_id_capture.store.file.read_only import transaction
    from token_id_capture.store.read.queries import describe_rollout

    rollout_argument(rollout)
    with reading(database) as connection:
        with transaction(connection):
            detail = describe_rollout(connection.execute, rollout)
        tree = _tree(connection, rollout)
    if json:
        from token_id_capture.cli.output.tree_text import tree_rows

        print_json({**asdict(detail), "tree": None if tree is None else tree_rows(tree)})
    else:
        _print(detail, tree)


def _tree(connection: Connection, rollout_id: str) -> CallTree | None:
    from token_id_capture.errors import ConflictingEntryError, CorruptCaptureError, InvalidEntryError
    from token_id_capture.explanation import call_tree
    from token_id_capture.store.read.evidence import read_evidence

    try:
        return call_tree(read_evidence(connection, rollout_id, everything=False).snapshot.entries)
    except (ConflictingEntryError, CorruptCaptureError, InvalidEntryError) as error:
        # All else can still be shown, and is needed then.
        report(f"there is no tree of the calls: {error}")
        return None


def _print(detail: RolloutDetail, tree: CallTree | None) -> None:
    summary = detail.summary
    print(f"rollout {summary.rollout_id}: {summary.state}, version {summary.version}")
    print(f"opened {local_time(summary.opened_at)}, snapshot {summary.snapshot_id or '-'}")
    for title, headers, rows in _sections(detail):
        print(f"\n{title}" if rows else f"\n{title}: none")
        if rows:
            print_table(headers, rows)
        if title == "calls" and tree is not None and tree.calls:
            _print_tree(tree)


def _print_tree(tree: CallTree) -> None:
    from token_id_capture.cli.output.tree_text import tree_lines

    print("\ntree")
    for line in tree_lines(tree):
        print(printable(line))


def _calls(calls: Sequence[CallSummary]) -> tuple[str, tuple[str, ...], list[tuple[object, ...]]]:
    # Call ids are long and say nothing; a number tells which call another one continues.
    number_of = {call.model_call_id: number for number, call in enumerate(calls, 1)}
    continuity = any(call.continuity is not None for call in calls)
    engines = len({call.upstream for call in calls}) > 1
    named = ("#", "continues", "shared", "prompt", "generated", "call", "agent", "for", "model", "finish")
    rows: list[tuple[object, ...]] = [
        (
            number,
            number_of.get(call.prefix_call_id or ""),
            call.prefix_length,
            call.prompt_length,
            call.generation_length,
            call.model_call_id,
            call.origin.agent,
            call.origin.purpose,
            call.model,
            call.finish_reason,
            *((call.continuity,) if continuity else ()),
            *((call.upstream,) if engines else ()),
            local_time(call.created_at),
        )
        for number, call in enumerate(calls, 1)
    ]
    more = (*(("continuity",) if continuity else ()), *(("engine",) if engines else ()))
    return "calls", (*named, *more, "created"), rows


def _session_headers(detail: RolloutDetail) -> list[tuple[object, ...]]:
    """A row for each header of a call that was flagged or is not stored: the tables of those have no width left."""
    told = {flag.model_call_id: flag.origin.session_headers or {} for flag in detail.flags}
    told |= {intent.model_call_id: intent.origin.session_headers or {} for intent in detail.intents}
    return [(call, name, value) for call, headers in told.items() for name, value in headers.items()]


def _sections(detail: RolloutDetail) -> list[tuple[str, tuple[str, ...], list[tuple[object, ...]]]]:
    return [
        _calls(detail.calls),
        (
            "flags",
            ("call", "agent", "reason", "detail", "flagged"),
            [
                (flag.model_call_id, flag.origin.agent, flag.reason, flag.detail, local_time(flag.flagged_at))
                for flag in detail.flags
            ],
        ),
        (
            "intents",
            ("call", "agent", "outcome", "detail", "begun", "by process", "on host"),
            [
                (
                    intent.model_call_id,
                    intent.origin.agent,
                    intent.outcome or "still open",
                    intent.detail,
                    local_time(intent.begun_at),
                    intent.writer_pid,
                    intent.writer_host,
                )
                for intent in detail.intents
            ],
        ),
        ("session headers of intents", ("call", "header", "value"), _session_headers(detail)),
        (
            "outcomes",
            ("version", "outcome", "reason", "recorded"),
            [(seen.version, seen.outcome, seen.reason, local_time(seen.recorded_at)) for seen in detail.outcomes],
        ),
        (
            "late writes",
            ("call", "state then", "attempted"),
            [(late.model_call_id, late.state, local_time(late.attempted_at)) for late in detail.late_writes],
        ),
    ]
