"""``tokcap finalize``: finished rollout records in, training rows out.

A row is durable before its rollout is retired or called delivered. So whatever interrupts the
command, running it again with the same arguments resumes where it stopped.
"""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from token_id_capture.cli.options import (
    EXIT_PARTIAL,
    DatabaseOption,
    JsonOption,
    ModelsOption,
    OverwriteOption,
    SequencesOption,
    ShardRowsOption,
    destination_option,
    existing_store,
    fail,
    model_names,
    output_stream,
    print_json,
    report,
    run,
)
from token_id_capture.cli.output.evidence import rollout_argument
from token_id_capture.cli.output.progress import progress_bar
from token_id_capture.cli.output.totals_text import exit_code, stopping, summary
from token_id_capture.cli.output.units import SinceOption, since_option
from token_id_capture.collector import collect_rarely
from token_id_capture.finalize.row_format import MaskedRows, RowFormat
from token_id_capture.lifecycle import Sequences
from token_id_capture.outputs.destination import Destination, FileFormat
from token_id_capture.outputs.whole_files import UnusableOutputError

if TYPE_CHECKING:
    from token_id_capture.config import TokenIdCaptureSettings
    from token_id_capture.finalize.publication import RowsOutput
    from token_id_capture.finalize.source import RolloutSource
    from token_id_capture.finalize.totals import Totals

STDIN = Path("-")

RolloutsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECORDS] [ROLLOUT]...",
        help="The records of finished rollouts, one JSON object per line (- reads a pipe), then the rollouts to "
        "finalize: by default each one that has a record. Without records, name the rollouts.",
    ),
]
RecordsOption = Annotated[
    Path | None, typer.Option("--records", metavar="RECORDS", help="The records, if all arguments are rollout ids.")
]
OutputOption = Annotated[
    # Not a Path, which would take the slashes out of a URL.
    str,
    typer.Option(
        "--output",
        "-o",
        metavar="PATH",
        help="Where the rows go. Rows are appended to a .jsonl file; a .jsonl.gz, .jsonl.zst or .parquet file, or a "
        "URL of fsspec such as s3://bucket/rows.parquet, is written once all rows are there. - is standard "
        "output.",
    ),
]
FileFormatOption = Annotated[
    FileFormat | None, typer.Option("--file-format", help="By default, taken from the ending of the output name.")
]
FormatOption = Annotated[
    RowFormat,
    typer.Option(
        "--format",
        metavar="record|trajectory",
        help="record: the record with its rebuilt response. trajectory: flat token_ids, loss_mask and log_probs.",
    ),
]
MaskedOption = Annotated[
    MaskedRows,
    typer.Option(
        "--masked",
        metavar="keep|drop|placeholder",
        help="What a masked rollout gets: a row without tokens, no row, or a row with one token without loss.",
    ),
]
GatewayOption = Annotated[
    str | None,
    typer.Option(
        "--gateway",
        metavar="URL",
        help="Take the rollouts from the hand-off of this gateway, instead of a database on this machine.",
    ),
]
KeyFileOption = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        envvar="TOKCAP_HAND_OFF_KEY_FILE",
        metavar="PATH",
        help="A file with the key of the gateway's --hand-off-key-file.",
    ),
]
RetireOption = Annotated[
    bool, typer.Option("--retire", help="Delete the captures of each unmasked rollout once its row is durable.")
]
IdFieldOption = Annotated[
    str | None, typer.Option("--id-field", metavar="FIELD", help="The field of a record that holds its rollout id.")
]
MinSamplesOption = Annotated[
    int | None,
    typer.Option("--mask-fraction-min-samples", min=1, help="Rows to build before --max-mask-fraction applies (50)."),
]
MaskFractionOption = Annotated[
    float | None,
    typer.Option("--max-mask-fraction", min=0, max=1, help="Stop once more than this fraction of the rows is masked."),
]


def finalize(
    output: OutputOption,
    rollouts: RolloutsArgument = None,
    records: RecordsOption = None,
    since: SinceOption = None,
    database: DatabaseOption = "",
    gateway: GatewayOption = None,
    key_file: KeyFileOption = None,
    row_format: FormatOption = RowFormat.RECORD,
    file_format: FileFormatOption = None,
    shard_rows: ShardRowsOption = None,
    overwrite: OverwriteOption = False,
    retire: RetireOption = False,
    max_mask_fraction: MaskFractionOption = None,
    mask_fraction_min_samples: MinSamplesOption = None,
    id_field: IdFieldOption = None,
    sequences: SequencesOption = Sequences.MAIN,
    masked: MaskedOption = MaskedRows.KEEP,
    models: ModelsOption = None,
    json: JsonOption = False,
) -> None:
    """Build the training rows of finished rollouts, and deliver their captures.

    The record says which response was scored, by its response id or its content. The sequence ends there, and later
    calls are not trained on.

    After an interruption, run it again with the same arguments. It does not repeat rows that are in the output, and
    retires their rollouts if necessary. If the output cannot grow row by row, rows wait as JSON lines in a file
    beside it, PATH.rows.jsonl, until all of them are there.
    """
    from token_id_capture.finalize.batch import Finalizer, Plan

    records, ids = _records_and_ids(list(rollouts or ()), records)
    to = _output(destination_option(output, file_format or _form(output), shard_rows, overwrite, json), retire)
    plan = Plan(
        output=to,
        row_format=row_format,
        retire=retire,
        id_field=id_field,
        sequences=sequences,
        masked=masked,
        models=model_names(models),
        rollouts=frozenset(ids),
        opened_since=None if since is None else since_option(since),
        from_records=records is not None,
        settings=_limits(max_mask_fraction, mask_fraction_min_samples),
    )
    source = _source(database, gateway, key_file)
    stream, size = _named(ids, id_field) if records is None else _open(records, to)
    with progress_bar() as show:
        collect_rarely()
        totals = run(Finalizer(plan, source, lambda done: show("finalize", done, size), report).run(stream))
    _summarise(totals, to, json)
    if code := exit_code(totals):
        raise typer.Exit(code)


def _form(output: str) -> FileFormat | None:
    """JSON lines, whatever the name ends in, unless that is Parquet: so it was before there were other forms."""
    return None if output.lower().endswith((".parquet", ".pq")) else FileFormat.JSONL


def _source(database: str, gateway: str | None, key_file: Path | None) -> RolloutSource:
    """The database or the gateway that was named; a database of the environment gives way to a gateway."""
    if gateway is None:
        return existing_store(database or fail("name the --database of the rollouts, or a --gateway"))
    if database != os.environ.get("TOKCAP_DATABASE", ""):
        fail("name a --database or a --gateway, not both")
    if key_file is None:
        fail("--gateway needs --key-file: a file with the key of the gateway's --hand-off-key-file")
    from token_id_capture.cli.serving.keys import check_key_file, read_key
    from token_id_capture.hand_off.client import HandOffClient

    check_key_file(key_file)
    return HandOffClient(gateway, read_key(key_file))


def _limits(fraction: float | None, samples: int | None) -> TokenIdCaptureSettings:
    """The limits that were given; what was not has the default of the configuration block."""
    from token_id_capture.config import TokenIdCaptureSettings

    given = {"max_mask_fraction": fraction, "mask_fraction_min_samples": samples}
    return TokenIdCaptureSettings.model_validate({name: value for name, value in given.items() if value is not None})


def _records_and_ids(arguments: list[str], records: Path | None) -> tuple[Path | None, list[str]]:
    """The records and the ids that are meant: without --records the first argument is a file, if there is one."""
    from token_id_capture.records import is_rollout_id

    if records is None and arguments and (os.path.exists(arguments[0]) or not is_rollout_id(arguments[0])):
        records = Path(arguments.pop(0))
    ids = [rollout_argument(rollout_id) for rollout_id in arguments]
    if records is None and not ids:
        fail("name the records of finished rollouts, or the rollouts")
    return records, ids


def _output(destination: Destination, retire: bool) -> RowsOutput:
    """Where rows go; ends the command where they could not be written, or not be as durable as the options say."""
    from token_id_capture.finalize.publication import RowsOutput, check_installed

    if retire and destination.is_stdout:
        fail("--retire needs durable rows, and a pipe cannot promise that: name a file")
    if retire and destination.is_url:
        fail("--retire needs each row to be durable on its own, and a URL cannot promise that: name a local file")
    check_installed(destination)
    replaces = destination.overwrite and any(destination.existing())
    output = RowsOutput(destination, output_stream, replaces)
    if output.grows:
        return output
    try:
        destination.check_free()
    except UnusableOutputError as error:
        waiting = output.appended
        fail(f"{error}; --overwrite replaces it with the rows of {waiting}" if waiting.exists() else str(error))
    return output


def _open(records: Path, output: RowsOutput) -> tuple[BinaryIO, int | None]:
    """The stream of the records, and their size in bytes, if it is known."""
    try:
        # Not sys.stdin: a thread that waits for it would hold its lock when the interpreter ends.
        # The thread that reads it closes it.
        stream = open(0, "rb", closefd=False) if records == STDIN else records.open("rb")  # noqa: SIM115
    except OSError as error:
        fail(f"cannot read {records}: {error.strerror}")
    status = os.fstat(stream.fileno())
    for path in [Path(output.destination.output), output.appended] if output.is_durable else []:
        if path.exists() and os.path.samestat(status, path.stat()):
            fail(f"{path} is the input: name another file for the rows")
    return stream, status.st_size if stat.S_ISREG(status.st_mode) else None


def _named(ids: list[str], id_field: str | None) -> tuple[BinaryIO, int]:
    """Records that tell nothing but the id of a rollout."""
    import orjson

    lines = b"".join(orjson.dumps({id_field or "_ng_rollout_id": one}, option=orjson.OPT_APPEND_NEWLINE) for one in ids)
    return io.BytesIO(lines), len(lines)


def _summarise(totals: Totals, output: RowsOutput, json: bool) -> None:
    if json:
        print_json(totals.as_dict())
    for line in stopping(totals) if json else summary(totals):
        report(line)
    if output.grows or output.destination.is_stdout:
        return
    if totals.stopped is not None and output.is_durable:
        report(f"the rows so far are in {output.appended}")
    elif totals.stopped is None and not totals.files:
        report("there are no rows, so no file was written")
        raise typer.Exit(EXIT_PARTIAL)
