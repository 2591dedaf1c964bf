"""What is known of rollouts: as it is stored, read and never frozen; and what finished records say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from token_id_capture.cli.options import fail

if TYPE_CHECKING:
    from token_id_capture.report.records import Told
    from token_id_capture.store.read.evidence import Evidence

RecordsOption = Annotated[
    Path | None,
    typer.Option(
        "--records",
        metavar="PATH",
        help="Finished records or training rows (JSON lines): show their rewards and groups.",
    ),
]


def rollout_argument(rollout_id: str) -> str:
    """A rollout id from the command line; ends the command if it is none."""
    from token_id_capture.records import validate_rollout_id

    try:
        return validate_rollout_id(rollout_id)
    except ValueError as error:
        fail(str(error))


def stored_evidence(database: str, rollout_id: str) -> Evidence:
    """Read one state of the rollout.

    Raises:
        UnknownRolloutError: it is not in the database.
        CorruptCaptureError: a call is damaged.
    """
    from token_id_capture.store.read.evidence import read_evidence
    from token_id_capture.store.reading import location_of, reading

    with reading(location_of(database)) as connection:
        return read_evidence(connection, rollout_id)


def told_in(path: Path | None) -> dict[str, Told]:
    """What the records in a file say of rollouts; ends the command if it cannot be read."""
    from token_id_capture.report.records import told_by

    if path is None:
        return {}
    try:
        return told_by(_objects(path))
    except (OSError, ValueError) as error:
        fail(f"cannot read records of {path}: {getattr(error, 'strerror', None) or error}")


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    import orjson

    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                try:
                    record = orjson.loads(line)
                except orjson.JSONDecodeError as error:
                    raise ValueError(f"line {number} is not JSON ({error})") from error
                if not isinstance(record, dict):
                    raise ValueError(f"line {number} is not an object")
                yield record
