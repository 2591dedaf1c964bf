"""What an output is, from its name: which form its rows have, and where they go. Loads nothing heavy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, Self

from token_id_capture.errors import ConfigurationError
from token_id_capture.outputs.compression import Compression, compression_of
from token_id_capture.outputs.remote import is_url, remote_names, remove_remote
from token_id_capture.outputs.whole_files import UnusableOutputError, refuse_existing

STDOUT: Final = "-"
_ENDINGS: Final = ".jsonl, .jsonl.gz, .jsonl.zst or .parquet"


class FileFormat(StrEnum):
    """What the output looks like."""

    JSONL = "jsonl"
    PARQUET = "parquet"


@dataclass(frozen=True)
class Destination:
    """One output: a file, a URL or ``-`` for standard output.

    With ``shard_rows`` it is a series of files of so many rows, ``rows-00000.parquet`` and so on for
    ``rows.parquet``. Without ``overwrite`` nothing that is there is replaced.
    """

    output: str
    file_format: FileFormat = FileFormat.JSONL
    shard_rows: int | None = None
    overwrite: bool = False

    @classmethod
    def of(cls, output: str, chosen: FileFormat | None, shard_rows: int | None, overwrite: bool) -> Self:
        """The destination that options mean.

        Raises:
            ConfigurationError: they contradict each other, or the name does not say what to write.
        """
        if output == STDOUT and shard_rows is not None:
            raise ConfigurationError("standard output is one stream: name a file for --shard-rows")
        return cls(output, _format(output, chosen), shard_rows, overwrite)

    @property
    def is_stdout(self) -> bool:
        """Whether rows go to standard output."""
        return self.output == STDOUT

    @property
    def is_url(self) -> bool:
        """Whether rows go to a file system of fsspec."""
        return is_url(self.output)

    @property
    def can_grow(self) -> bool:
        """Whether it is one local file to which whole rows can be appended one by one."""
        local = not (self.is_stdout or self.is_url)
        return local and self.file_format is FileFormat.JSONL and not (self.compression or self.shard_rows)

    @property
    def compression(self) -> Compression | None:
        """What its bytes are compressed with, if not by its form."""
        return compression_of(Path(self.output))

    def name(self, number: int) -> str:
        """The output of the shard of this number, from 0."""
        return self.output if self.shard_rows is None else self._shard(f"{number:05}")

    def check_free(self) -> None:
        """Raises:
        ConfigurationError: something is there that must not be replaced, or it cannot be looked at.
        UnusableOutputError: the same of a local file.
        """
        if self.is_stdout or (self.overwrite and self.is_url):
            return
        there = next(self.existing(), None)
        if there is None:
            return
        if not self.is_url:
            refuse_existing(Path(there), may_replace=lambda path: self.overwrite)
        elif not self.overwrite:
            raise ConfigurationError(
                f"{there} is there already and is not replaced: name a new file, or say --overwrite"
            )

    def existing(self) -> Iterator[str]:
        """The files of this output that are there already, shards of any number among them."""
        if self.is_url:
            yield from remote_names(self.output if self.shard_rows is None else self._shard("[0-9]" * 5))
        elif self.shard_rows is None:
            yield from [self.output] if Path(self.output).exists() or Path(self.output).is_symlink() else []
        else:
            before, after = map(re.escape, Path(self._shard("\0")).name.split("\0"))
            shard, folder = re.compile(f"{before}[0-9]{{5,}}{after}"), Path(self.output).parent
            found = folder.iterdir() if folder.is_dir() else iter(())
            yield from sorted(str(path) for path in found if shard.fullmatch(path.name))

    def remove(self, name: str) -> None:
        """Delete one of ``existing``."""
        if self.is_url:
            remove_remote(name)
            return
        try:
            Path(name).unlink(missing_ok=True)
        except OSError as error:
            raise UnusableOutputError(f"cannot remove {name}: {error.strerror}") from error

    def _shard(self, number: str) -> str:
        endings = "".join(Path(self.output).suffixes[-2 if self.compression else -1 :])
        return f"{self.output.removesuffix(endings)}-{number}{endings}"


def _format(output: str, chosen: FileFormat | None) -> FileFormat:
    name = Path(output)
    packed = compression_of(name)
    ending = (name.with_suffix("") if packed else name).suffix.lower()
    if chosen is FileFormat.PARQUET and packed:
        raise ConfigurationError(
            f"{output} would be compressed twice, as Parquet is already: let its name end in .parquet"
        )
    if chosen is not None:
        return chosen
    if ending in (".parquet", ".pq") and not packed:
        return FileFormat.PARQUET
    if output != STDOUT and ending not in (".jsonl", ".ndjson"):
        raise ConfigurationError(f"--file-format is needed: the name {output} does not end in {_ENDINGS}")
    return FileFormat.JSONL
