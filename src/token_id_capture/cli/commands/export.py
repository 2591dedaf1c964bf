"""``tokcap export``: captured sequences for other programs."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from token_id_capture.cli.options import (
    EXIT_INTERRUPTED,
    EXIT_PARTIAL,
    OUTPUT_FORMS,
    DatabaseOption,
    JsonOption,
    ModelsOption,
    OverwriteOption,
    SequencesOption,
    ShardRowsOption,
    destination_option,
    fail,
    let_others_go_first,
    model_names,
    output_stream,
    print_json,
    report,
)
from token_id_capture.cli.output.evidence import rollout_argument
from token_id_capture.cli.output.progress import Show, progress_bar
from token_id_capture.cli.output.units import SinceOption, plural, since_option
from token_id_capture.collector import collect_rarely
from token_id_capture.lifecycle import Sequences
from token_id_capture.outputs.destination import Destination, FileFormat

if TYPE_CHECKING:
    from token_id_capture.export.record_fields import RecordFields
    from token_id_capture.export.run import Exported
    from token_id_capture.store.read.evidence import Scope

_LISTED = 20


@dataclass(frozen=True)
class Plan:
    """The options of the command."""

    database: str
    destination: Destination
    scope: Scope
    per_request: bool
    include_open: bool
    sequences: Sequences
    models: tuple[str, ...] | None
    jobs: int


RolloutsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[ROLLOUT]...", help="The rollouts to export; by default all.")
]
OutputOption = Annotated[
    # Not a Path, which would take the slashes out of a URL.
    str,
    typer.Option(
        "--output",
        "-o",
        metavar="PATH",
        help=f"The new file: {OUTPUT_FORMS}",
    ),
]
FormatOption = Annotated[
    FileFormat | None,
    typer.Option("--file-format", "--format", help="By default, taken from the ending of the output name."),
]
PerRequestOption = Annotated[
    bool, typer.Option("--per-request", help="Export each call as its own sequence, also from masked rollouts.")
]
IncludeOpenOption = Annotated[
    bool, typer.Option("--include-open", help="Also export rollouts that are not frozen, as they are now.")
]
RecordsOption = Annotated[
    Path | None,
    typer.Option(
        "--records",
        metavar="ROLLOUTS",
        help="Rollout records, one JSON object a line: only rollouts that have one are exported.",
    ),
]
FieldsOption = Annotated[
    str, typer.Option("--fields", metavar="NAMES", help="Fields of the records, as in reward,task or info.score.")
]
IdFieldOption = Annotated[
    str | None, typer.Option("--id-field", metavar="FIELD", help="The field of a record that holds its rollout id.")
]
JobsOption = Annotated[
    int, typer.Option(min=0, help="Processes that read; 0 means one per processor if there are many rollouts.")
]


def export(
    database: DatabaseOption,
    output: OutputOption,
    rollouts: RolloutsArgument = None,
    file_format: FormatOption = None,
    shard_rows: ShardRowsOption = None,
    overwrite: OverwriteOption = False,
    since: SinceOption = None,
    per_request: PerRequestOption = False,
    include_open: IncludeOpenOption = False,
    records: RecordsOption = None,
    fields: FieldsOption = "",
    id_field: IdFieldOption = None,
    sequences: SequencesOption = Sequences.MAIN,
    models: ModelsOption = None,
    jobs: JobsOption = 0,
    json: JsonOption = False,
) -> None:
    """Export the sequences of rollouts that are in the database.

    Writes one row per rollout, or one per sequence with --sequences all: token_ids, loss_mask, log_probs and their
    origin. Exports only frozen rollouts, and only what would be delivered. With --records, a sequence ends with the
    scored response. Retired rollouts are no longer in the database; their rows are where they were delivered. Only
    reads, even while others write: it freezes, retires and records nothing. The output appears under its name when it
    is whole. Exit code 1: damaged data was left out, a requested rollout is missing or has no record, or there is no
    row and therefore no file; 2: nothing was written.
    """
    plan = Plan(
        database=database,
        destination=destination_option(output, file_format, shard_rows, overwrite, json),
        scope=_scope(rollouts, since),
        per_request=per_request,
        include_open=include_open,
        sequences=sequences,
        models=model_names(models),
        jobs=jobs,
    )
    names = _field_names(fields, records)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    let_others_go_first()
    try:
        with progress_bar() as show, _fields_of(records, names, id_field, show) as found:
            exported = _export(plan, found, show)
    except KeyboardInterrupt:
        fail("interrupted: no file was written", EXIT_INTERRUPTED)
    if json:
        print_json(exported)
    _summarise(exported, plan, json)


def _scope(rollouts: list[str] | None, since: str | None) -> Scope:
    from token_id_capture.store.read.evidence import Scope

    return Scope(
        rollout_ids=tuple(map(rollout_argument, rollouts or ())),
        opened_since=None if since is None else since_option(since),
    )


def _field_names(fields: str, records: Path | None) -> list[str]:
    from token_id_capture.outputs.columns import CALL_COLUMNS, TRAJECTORY_COLUMNS

    names = list(dict.fromkeys(name.strip() for name in fields.split(",") if name.strip()))
    if names and records is None:
        fail("--fields needs --records: the records to take them from")
    taken = {column.name for column in (*CALL_COLUMNS, *TRAJECTORY_COLUMNS)}.intersection(names)
    if taken:
        fail(f"--fields: {', '.join(sorted(taken))} is a column of the export itself: rename it in the records")
    return names


@contextmanager
def _fields_of(
    records: Path | None, names: list[str], id_field: str | None, show: Show
) -> Iterator[RecordFields | None]:
    """The named fields of all records, read before anything is written."""
    if records is None:
        yield None
        return
    from token_id_capture.export.record_fields import RecordFields
    from token_id_capture.finalize.rows import read_line

    found, done = RecordFields(names), 0
    with contextlib.closing(found):
        try:
            with records.open("rb") as lines:
                size = records.stat().st_size
                for number, raw in enumerate(lines, 1):
                    if raw.strip():
                        line = read_line(number, raw, id_field)
                        found.add(line.rollout_id, line.record)
                    done += len(raw)
                    show("records", done, size)
        except OSError as error:
            fail(f"cannot read {records}: {error.strerror}")
        except ValueError as error:
            fail(f"{records} line {number}: {error}")
        if found.missing():
            fail(f"no record in {records} has a field {' or '.join(map(repr, found.missing()))}: check --fields")
        yield found


def _export(plan: Plan, fields: RecordFields | None, show: Show) -> Exported:
    from token_id_capture.export.parts import Choice
    from token_id_capture.export.run import Exporter
    from token_id_capture.lifecycle import State
    from token_id_capture.outputs.columns import CALL_COLUMNS, TRAJECTORY_COLUMNS
    from token_id_capture.outputs.writer import row_writer
    from token_id_capture.store.reading import location_of

    columns = (
        *(CALL_COLUMNS if plan.per_request else TRAJECTORY_COLUMNS),
        *(fields.columns() if fields else ()),
    )
    database = location_of(plan.database)
    states = (State.FROZEN, State.OPEN) if plan.include_open else (State.FROZEN,)
    plan.destination.check_free()
    collect_rarely()
    with row_writer(plan.destination, columns, output_stream) as writer:
        exporter = Exporter(
            database,
            writer.write,
            Choice(plan.per_request, states, plan.sequences, plan.models),
            scope=plan.scope,
            fields=fields,
            jobs=plan.jobs,
            show=lambda done, total: show("export", done, total),
        )
        return exporter.run()


def _summarise(exported: Exported, plan: Plan, json: bool) -> None:
    for line in () if json else _summary(exported, plan):
        report(line)
    for absent in exported.without_rollout[:_LISTED]:
        report(absent)
    if len(exported.without_rollout) > _LISTED:
        report(f"and {len(exported.without_rollout) - _LISTED:,} more; --json lists them all")
    for damage in exported.damaged[:_LISTED]:
        report(damage)
    if len(exported.damaged) > _LISTED:
        report(f"and {len(exported.damaged) - _LISTED:,} more; tokcap verify lists every damage")
    if not exported.rows:
        report("there is no row to export" + ("" if plan.destination.is_stdout else ", so no file was written"))
    if exported.damaged or exported.without_rollout or exported.without_record or not exported.rows:
        raise typer.Exit(EXIT_PARTIAL)


def _summary(exported: Exported, plan: Plan) -> Iterator[str]:
    rows = f"{plural(exported.rows, 'call')} of " if plan.per_request else ""
    yield (
        f"exported {rows}{plural(exported.rollouts, 'rollout')}: {plural(exported.tokens, 'token')}, "
        f"{exported.sampled_tokens:,} of them sampled"
    )
    for reason, count in exported.masked.most_common():
        yield f"{count:>6,} left out, masked: {reason}"
    if exported.open_rollouts:
        yield f"{exported.open_rollouts:>6,} left out, not frozen: --include-open exports them as they are"
    if exported.without_record:
        yield f"{exported.without_record:>6,} left out, without a record"
