"""Write rows to a destination."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, TypeAlias

from token_id_capture.outputs.columns import Column
from token_id_capture.outputs.compression import compressed
from token_id_capture.outputs.destination import Destination, FileFormat
from token_id_capture.outputs.jsonl import JsonLines, Row
from token_id_capture.outputs.parquet import Parquet
from token_id_capture.outputs.remote import remote_files
from token_id_capture.outputs.whole_files import whole_files

OpenStream: TypeAlias = Callable[[], contextlib.AbstractContextManager[BinaryIO]]


class RowWriter:
    """Rows in the form and the files of one destination."""

    def __init__(
        self, destination: Destination, columns: Sequence[Column], open_file: Callable[[str], BinaryIO]
    ) -> None:
        self._destination = destination
        self._columns = columns
        self._open_file = open_file
        self._file: JsonLines | Parquet | None = None
        self._packed = ExitStack()
        self._rows = 0
        self.names: list[str] = []
        """The files that were begun, in their order; none without a row."""

    def write(self, row: Row | bytes) -> None:
        """Append a row, or the line of one.

        Raises:
            UnusableOutputError: it cannot be written.
            ConfigurationError: what is needed to write it is not installed, or a remote file cannot be written.
            InvalidEntryError: a token id does not fit into Parquet's column.
        """
        file = self._begin() if self._file is None else self._file
        file.write(row)
        self._rows += 1
        if self._rows == self._destination.shard_rows:
            self.finish()

    def finish(self) -> None:
        """Complete the file that is being written."""
        if self._file is not None:
            self._file.finish()
            self._packed.close()
            self._file, self._rows = None, 0

    def abandon(self) -> None:
        """End after an error, in the middle of a file."""
        if self._file is not None:
            self._file.abandon()

    def _begin(self) -> JsonLines | Parquet:
        name = self._destination.name(len(self.names))
        stream = self._packed.enter_context(compressed(self._open_file(name), self._destination.compression))
        parquet = self._destination.file_format is FileFormat.PARQUET
        self._file = Parquet(stream, self._columns) if parquet else JsonLines(stream)
        self.names.append(name)
        return self._file


@contextmanager
def row_writer(destination: Destination, columns: Sequence[Column], stdout: OpenStream) -> Iterator[RowWriter]:
    """A writer whose files appear when the block ends well, and replace what ``overwrite`` allows to replace.

    A destination without a row gets no file, and what was there stays. ``stdout`` opens standard output.

    Raises:
        UnusableOutputError: a local file cannot be written, or is there already.
        ConfigurationError: the same of a remote one.
    """
    with _files(destination, stdout) as open_file:
        writer = RowWriter(destination, columns, open_file)
        try:
            yield writer
            writer.finish()
        except BaseException:
            writer.abandon()
            raise
    if writer.names and destination.overwrite and destination.shard_rows is not None:
        # Shards of an earlier output that had more of them would be read along with the new ones.
        kept = {Path(name).name for name in writer.names}
        for name in destination.existing():
            if Path(name).name not in kept:
                destination.remove(name)


@contextmanager
def _files(destination: Destination, stdout: OpenStream) -> Iterator[Callable[[str], BinaryIO]]:
    if destination.is_stdout:
        with stdout() as stream:
            yield lambda name: stream
    elif destination.is_url:
        with remote_files(destination.output) as open_remote:
            yield open_remote
    else:
        with whole_files(may_replace=lambda path: destination.overwrite) as open_local:
            yield lambda name: open_local(Path(name))
