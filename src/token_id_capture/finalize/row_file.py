"""The output of ``tokcap finalize``: rows are only ever appended, and durable before anything relies on them."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Self

from token_id_capture.finalize.output_file import UnusableOutputError, sync_directory

if TYPE_CHECKING:
    from token_id_capture.finalize.rows import Delivered


class RowFile:
    """A file of JSON lines that one process appends to.

    ``delivered`` says which rollouts stood in it when it was opened.
    """

    def __init__(self, path: Path, read_row: Callable[[bytes], tuple[str, Delivered]]) -> None:
        """Open or create the file, and cut off a row that an interrupted run left half written.

        Raises:
            UnusableOutputError: it is no regular file, another process writes it, or a line of it
                is no row that ``read_row`` knows (a ``ValueError`` of it). Nothing is changed then.
        """
        self._path = path
        self._directory_synced = False
        self.delivered: dict[str, Delivered] = {}
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UnusableOutputError(f"cannot write {path}: {error.strerror}") from error
        try:
            self._claim()
            self._scan(read_row)
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._descriptor)

    def append(self, row: bytes) -> None:
        """Add one row, which ends in a newline.

        Raises:
            UnusableOutputError: it could not be written; the next run cuts off what was.
        """
        rest = memoryview(row)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            raise UnusableOutputError(f"cannot write {self._path}: {error.strerror}") from error

    def sync(self) -> None:
        """Make every row durable that was appended so far, and at first the file's own name.

        Raises:
            UnusableOutputError: the rows may not be durable.
        """
        try:
            os.fsync(self._descriptor)
            if not self._directory_synced:
                sync_directory(self._path)
                self._directory_synced = True
        except OSError as error:
            raise UnusableOutputError(f"cannot make {self._path} durable: {error.strerror}") from error

    def _claim(self) -> None:
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            raise UnusableOutputError(f"cannot write {self._path}: rows can be made durable only in a regular file")
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UnusableOutputError(
                f"another process writes {self._path}: wait for it, or name another file"
            ) from error

    def _scan(self, read_row: Callable[[bytes], tuple[str, Delivered]]) -> None:
        whole = 0
        with open(self._descriptor, "rb", closefd=False) as lines:
            for number, raw in enumerate(lines, 1):
                try:
                    rollout_id, delivered = read_row(raw)
                except (ValueError, TypeError, RecursionError) as error:
                    # A row begins with a brace, so what else stands there is not ours to cut off.
                    if raw.startswith(b"{") and not raw.endswith(b"\n") and not _is_json(raw):
                        os.ftruncate(self._descriptor, whole)
                        return
                    raise UnusableOutputError(
                        f"{self._path} line {number} is no row of this command ({error}): name another file"
                    ) from error
                self.delivered[rollout_id] = delivered
                whole += len(raw)
        if whole and not raw.endswith(b"\n"):
            self.append(b"\n")


def _is_json(raw: bytes) -> bool:
    try:
        json.loads(raw)
    except ValueError:
        return False
    return True
