"""The rows of a run as the output that was asked for: Parquet, compressed, in shards, behind a URL or in a pipe.

Such an output cannot grow by a row that is durable at once, so rows are appended to a file of JSON lines first, as
they always are, and become the output when the input has ended. The output appears under its name when it is whole.
"""

from __future__ import annotations

import dataclasses
import io
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from token_id_capture.builder.rows import TrainingRow
from token_id_capture.errors import TokenCaptureError
from token_id_capture.finalize.row_file import ReadRow, RowFile
from token_id_capture.finalize.row_format import RowFormat
from token_id_capture.finalize.row_pipe import RowPipe
from token_id_capture.outputs.columns import TRAJECTORY_COLUMNS, Column, Kind
from token_id_capture.outputs.compression import compressed
from token_id_capture.outputs.destination import Destination, FileFormat
from token_id_capture.outputs.jsonl import parse
from token_id_capture.outputs.parquet import Parquet
from token_id_capture.outputs.shapes import Shape
from token_id_capture.outputs.whole_files import UnusableOutputError
from token_id_capture.outputs.writer import OpenStream, row_writer

_TRAINING_ROW: Final = {field.name for field in dataclasses.fields(TrainingRow)}
_KNOWN: Final = {column.name: column for column in TRAJECTORY_COLUMNS if column.name in _TRAINING_ROW}


@dataclass(frozen=True)
class RowsOutput:
    """The destination of a run's rows, and the file that they are appended to before."""

    destination: Destination
    stdout: OpenStream
    replaces: bool = False
    """Whether something is there that ``--overwrite`` allows to replace."""

    @property
    def grows(self) -> bool:
        """Whether rows are appended to the output itself."""
        return self.destination.can_grow and not self.destination.overwrite

    @property
    def is_durable(self) -> bool:
        """Whether a row is on disk, and stays there, once its batch is done."""
        return not (self.destination.is_stdout or self.destination.is_url)

    @property
    def appended(self) -> Path:
        """The file of JSON lines that rows are appended to, if they are durable."""
        output = self.destination.output
        return Path(output if self.grows else f"{output}.rows.jsonl")

    @contextmanager
    def opened(self, read: ReadRow) -> Iterator[RowFile | RowPipe]:
        """Where rows go one by one.

        Raises:
            UnusableOutputError: as for ``RowFile``.
        """
        if self.destination.is_stdout and self.destination.file_format is FileFormat.JSONL:
            with RowPipe() as pipe:
                yield pipe
        elif self.is_durable:
            with RowFile(self.appended, read) as rows:
                yield rows
        else:
            with tempfile.TemporaryDirectory() as directory, RowFile(Path(directory) / "rows.jsonl", read) as rows:
                yield rows

    def publish(self, rows: RowFile, row_format: RowFormat, is_stopped: Callable[[], bool]) -> list[str]:
        """Make the output of the rows, and delete the file that they were appended to.

        Raises:
            StoppedError: ``is_stopped`` said so.
            UnusableOutputError: the output cannot be written; the rows stay where they are, which the message names.
        """
        try:
            names = publish(rows.path, row_format, self.destination, self.stdout, is_stopped)
        except TokenCaptureError as error:
            if isinstance(error, StoppedError) or not self.is_durable:
                raise
            raise UnusableOutputError(f"{error}; the rows are in {rows.path}") from error
        rows.path.unlink()
        return names


class StoppedError(TokenCaptureError):
    """The run was interrupted while its rows became the output; nothing of it is there."""


def check_installed(destination: Destination) -> None:
    """Raises:
    ConfigurationError: what the output needs is not installed; the message says how to get it.
    """
    with compressed(io.BytesIO(), destination.compression):
        if destination.file_format is FileFormat.PARQUET:
            Parquet(io.BytesIO(), ())


def publish(
    rows: Path, row_format: RowFormat, destination: Destination, stdout: OpenStream, is_stopped: Callable[[], bool]
) -> list[str]:
    """Write the rows of this file of JSON lines to the destination; returns the names of its files.

    Raises:
        StoppedError: ``is_stopped`` said so.
        UnusableOutputError: a local output cannot be written, or is there already.
        ConfigurationError: the same of a remote one.
        InvalidEntryError: a token id does not fit into Parquet's column.
    """
    columns: Sequence[Column] = ()
    if destination.file_format is FileFormat.PARQUET:
        columns = _columns(rows, row_format, is_stopped)
    with row_writer(destination, columns, stdout) as writer, rows.open("rb") as lines:
        for line in lines:
            _stop_if(is_stopped)
            writer.write(line)
    return writer.names


def _columns(rows: Path, row_format: RowFormat, is_stopped: Callable[[], bool]) -> Sequence[Column]:
    """The columns that fit every row, in the order in which rows have them."""
    known = _KNOWN if row_format is RowFormat.TRAJECTORY else {}
    columns: dict[str, Column] = {}
    with rows.open("rb") as lines:
        for line in lines:
            _stop_if(is_stopped)
            for name, value in parse(line).items():
                column = columns.get(name)
                if column is None:
                    column = columns[name] = known.get(name) or Column(name, Kind.FOUND, "of the record", Shape())
                if column.shape is not None:
                    column.shape.add(value)
    return tuple(columns.values())


def _stop_if(is_stopped: Callable[[], bool]) -> None:
    if is_stopped():
        raise StoppedError("interrupted while the output was written")
