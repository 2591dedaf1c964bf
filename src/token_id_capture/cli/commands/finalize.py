"""``tokcap finalize``: finished rollout records in, training rows out.

A row is durable before its rollout is retired or called delivered. So whatever interrupts the
command, running it again with the same arguments resumes where it stopped.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from token_id_capture.cli.options import (
    DatabaseOption,
    JsonOption,
    ModelsOption,
    SequencesOption,
    existing_store,
    fail,
    model_names,
    print_json,
    report,
    run,
)
from token_id_capture.cli.output.progress import progress_bar
from token_id_capture.cli.output.totals_text import exit_code, stopping, summary
from token_id_capture.finalize.row_format import MaskedRows, RowFormat
from token_id_capture.lifecycle import Sequences

if TYPE_CHECKING:
    from token_id_capture.config import TokenIdCaptureSettings
    from token_id_capture.finalize.source import RolloutSource
    from token_id_capture.finalize.totals import Totals

STDIN = STDOUT = Path("-")

OutputOption = Annotated[
    Path,
    typer.Option(
        "--output",
        "-o",
        metavar="PATH",
        help="The file that rows are appended to; - is standard output.",
    ),
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
MaskFractionOption = Annotated[
    float | None,
    typer.Option("--max-mask-fraction", min=0, max=1, help="Stop once more than this fraction of the rows is masked."),
]


def finalize(
    rollouts: Annotated[
        Path,
        typer.Argument(metavar="ROLLOUTS", help="Finished rollout records, one JSON object a line; - reads a pipe."),
    ],
    output: OutputOption,
    database: DatabaseOption = "",
    gateway: GatewayOption = None,
    key_file: KeyFileOption = None,
    row_format: FormatOption = RowFormat.RECORD,
    retire: Annotated[
        bool, typer.Option("--retire", help="Delete the captures of each unmasked rollout once its row is durable.")
    ] = False,
    max_mask_fraction: MaskFractionOption = None,
    mask_fraction_min_samples: Annotated[
        int | None,
        typer.Option("--mask-fraction-min-samples", min=1, help="Rows to see before --max-mask-fraction counts (50)."),
    ] = None,
    id_field: Annotated[
        str | None,
        typer.Option("--id-field", metavar="FIELD", help="The field of a record that holds its rollout id."),
    ] = None,
    sequences: SequencesOption = Sequences.MAIN,
    masked: MaskedOption = MaskedRows.KEEP,
    models: ModelsOption = None,
    json: JsonOption = False,
) -> None:
    """Build the training rows of finished rollouts, and deliver their captures.

    The record says which response was scored, if it can be told: by its response id or its content. The sequence
    ends there, and what came later is not trained on.

    Run again with the same arguments after an interruption: rows that stand in the output are not
    repeated, and are retired if they were not yet.
    """
    from token_id_capture.finalize.batch import Finalizer, Plan

    plan = Plan(
        output=output,
        row_format=row_format,
        retire=retire,
        id_field=id_field,
        sequences=sequences,
        masked=masked,
        models=model_names(models),
        settings=_limits(max_mask_fraction, mask_fraction_min_samples),
    )
    _check_output(output, retire, json)
    source = _source(database, gateway, key_file)
    stream = _open(rollouts, output)
    status = os.fstat(stream.fileno())
    size = status.st_size if stat.S_ISREG(status.st_mode) else None
    with progress_bar() as show:
        totals = run(Finalizer(plan, source, lambda done: show("finalize", done, size), report).run(stream))
    _summarise(totals, json)
    if code := exit_code(totals):
        raise typer.Exit(code)


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


def _check_output(output: Path, retire: bool, json: bool) -> None:
    """End the command where rows could not be written as the options say, or not be durable."""
    if output == STDOUT and retire:
        fail("--retire needs rows that are durable, and nobody knows what becomes of them in a pipe: name a file")
    if output == STDOUT and json:
        fail("rows and --json cannot both go to standard output: name a file for the rows")
    if output.parts and output.parts[0].endswith(":"):
        fail(
            f"{output} is a URL, and rows are made durable one by one in a local file: name one, and copy it afterwards"
        )
    if output.suffix.lower() in (".parquet", ".pq", ".gz", ".zst"):
        fail(
            f"rows are appended one by one and made durable, which a file like {output.name} does not allow: name a "
            ".jsonl file here; tokcap export writes Parquet and compressed files, before the rollouts are retired"
        )


def _open(rollouts: Path, output: Path) -> BinaryIO:
    try:
        # Not sys.stdin: a thread that waits for it would hold its lock when the interpreter ends.
        # The thread that reads it closes it.
        stream = open(0, "rb", closefd=False) if rollouts == STDIN else rollouts.open("rb")  # noqa: SIM115
    except OSError as error:
        fail(f"cannot read {rollouts}: {error.strerror}")
    if output.exists() and os.path.samestat(os.fstat(stream.fileno()), output.stat()):
        fail(f"{output} is the input: name another file for the rows")
    return stream


def _summarise(totals: Totals, json: bool) -> None:
    if json:
        print_json(totals.as_dict())
    for line in stopping(totals) if json else summary(totals):
        report(line)
