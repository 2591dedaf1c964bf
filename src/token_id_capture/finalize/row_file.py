"""The output of ``tokcap finalize``: rows are only ever appended, and durable before anything relies on them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, Self, TypeAlias

from token_id_capture.outputs.whole_files import UnusableOutputError, sync_directory

if TYPE_CHECKING:
    from token_id_capture.finalize.rows import Delivered

ReadRow: TypeAlias = "Callable[[bytes], tuple[str, Delivered]]"
"""Reads a row of an earlier run; raises ``ValueError`` if the line is not such a row."""

_PIECE: Final = 2**20
_NAMED_ROLLOUT: Final = re.compile(rb'"rollout_id": ?"([A-Za-z0-9][A-Za-z0-9._-]*)')
# JSON has no control character but these; a file of another kind mostly has.
_FOREIGN: Final = re.compile(rb"[\x01-\x08\x0b\x0c\x0e-\x1f]")


@dataclass(frozen=True)
class Damage:
    """The part of the file from its first line that is not a row to its end, as a loss of power leaves it.

    ``start`` is in bytes. ``named`` are the rollouts whose ids can still be read in it; only zeros or a
    hole can hide a row that was written whole.
    """

    line: int
    start: int
    named: frozenset[str]


@dataclass(frozen=True)
class _Unfinished:
    """A rollout of which further rows must follow: where its first one stands."""

    rollout_id: str
    line: int
    start: int


class RowFile:
    """A file of JSON lines that one process appends to.

    ``delivered`` says which rollouts stood in it when it was opened, in the order of their rows, ``end`` how
    long it is in bytes without what is damaged.
    """

    def __init__(self, path: Path, read_row: ReadRow) -> None:
        """Open or create the file, and read what is in it.

        Raises:
            UnusableOutputError: it is not a regular file, another process writes it, or a line of it
                is not a row that ``read_row`` knows (a ``ValueError`` of it). Nothing is changed then.
        """
        self.path = path
        self._directory_synced = False
        self.delivered: dict[str, Delivered] = {}
        self.damage: Damage | None = None
        self._ends: dict[str, int] = {}
        self._unfinished: _Unfinished | None = None
        self.end = 0
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UnusableOutputError(f"cannot write {path}: {error.strerror}") from error
        try:
            self._claim()
            self._scan(read_row)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._synced = self.end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._descriptor)

    def end_of(self, rollout_id: str) -> int:
        """Where the row of a rollout in ``delivered`` ends, in bytes."""
        return self._ends[rollout_id]

    def append(self, row: bytes) -> None:
        """Add one row, which ends in a newline.

        Raises:
            UnusableOutputError: it could not be written; the next run cuts off what was.
        """
        rest = memoryview(row)
        try:
            while rest:
                written = os.write(self._descriptor, rest)
                self.end += written
                rest = rest[written:]
        except OSError as error:
            raise UnusableOutputError(f"cannot write {self.path}: {error.strerror}") from error

    def sync(self) -> None:
        """Make every row durable that was appended so far, and at first the file's own name.

        Raises:
            UnusableOutputError: the rows may not be durable, or the file is not under its name any more.
        """
        try:
            os.fsync(self._descriptor)
            if not self._directory_synced:
                sync_directory(self.path)
                self._directory_synced = True
        except OSError as error:
            # Linux takes the pages of a failed fsync for clean, so a later fsync would prove nothing about them.
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._synced)
            raise UnusableOutputError(f"cannot make {self.path} durable: {error.strerror}") from error
        self._require_name()
        self._synced = self.end

    def cut_damage(self) -> None:
        """Cut the damage off. The rows in it are written again as their rollouts come.

        Raises:
            UnusableOutputError: the file could not be cut.
        """
        try:
            os.ftruncate(self._descriptor, self.end)
        except OSError as error:
            raise UnusableOutputError(f"cannot repair {self.path}: {error.strerror}") from error
        self.damage = None

    def write_again(self, start: int) -> None:
        """Write everything from byte ``start`` on once more and sync it: an fsync that an earlier run never saw
        succeed may have failed, and only pages that are written again are synced again.

        Raises:
            UnusableOutputError: it may not be durable.
        """
        self._synced = start
        if start == self.end:
            return
        try:
            with _positioned(self._descriptor):
                for position in range(start, self.end, _PIECE):
                    piece = os.pread(self._descriptor, min(_PIECE, self.end - position), position)
                    os.pwrite(self._descriptor, piece, position)
        except OSError as error:
            raise UnusableOutputError(f"cannot write {self.path}: {error.strerror}") from error
        self.sync()

    def _require_name(self) -> None:
        """Whether the rows can be found: what was written is in a file that may have no name any more."""
        here = os.fstat(self._descriptor)
        try:
            named: os.stat_result | None = os.stat(self.path)
        except OSError:
            named = None
        if named is None or not os.path.samestat(here, named):
            what = "removed" if named is None else "replaced by another file"
        elif here.st_size < self.end:
            what = "shortened by another program"
        else:
            return
        raise UnusableOutputError(
            f"{self.path} was {what} while rows were written to it; the rollouts of its last rows keep their "
            "captures: run the same command again"
        )

    def _claim(self) -> None:
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            raise UnusableOutputError(f"cannot write {self.path}: rows can be made durable only in a regular file")
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UnusableOutputError(
                f"another process writes {self.path}: wait for it, or name another file"
            ) from error

    def _scan(self, read_row: ReadRow) -> None:
        with open(self._descriptor, "rb", closefd=False) as lines:
            for number, raw in enumerate(lines, 1):
                try:
                    rollout_id, delivered = read_row(raw)
                except (ValueError, TypeError, RecursionError) as error:
                    self.damage = self._damage(number, raw, lines)
                    if self.damage is not None:
                        if self._unfinished is not None:
                            self.damage = self._cut_rollout(self.damage.named)
                        return
                    raise UnusableOutputError(
                        f"{self.path} line {number} is not a row of this command ({error}): name another file"
                    ) from error
                self._note(rollout_id, delivered, number, len(raw))
        if self._unfinished is not None:
            self.damage = self._cut_rollout(frozenset())
        elif self.end and not raw.endswith(b"\n"):
            self.append(b"\n")

    def _note(self, rollout_id: str, delivered: Delivered, number: int, size: int) -> None:
        """One more row: of a new rollout, or a further one of the last."""
        if self._unfinished is None:
            self._unfinished = _Unfinished(rollout_id, number, self.end)
        elif self._unfinished.rollout_id != rollout_id:
            raise UnusableOutputError(
                f"{self.path} line {number}: rows of rollout {self._unfinished.rollout_id!r} are missing before it"
            )
        else:
            delivered = replace(delivered, masked=delivered.masked and self.delivered[rollout_id].masked)
        self.end += size
        self.delivered.pop(rollout_id, None)
        self.delivered[rollout_id] = delivered
        self._ends[rollout_id] = self.end
        if delivered.last:
            self._unfinished = None

    def _cut_rollout(self, named: frozenset[str]) -> Damage:
        """The damage that begins with the first row of the rollout of which rows are missing."""
        unfinished = self._unfinished
        assert unfinished is not None
        del self.delivered[unfinished.rollout_id]
        self.end = unfinished.start
        return Damage(unfinished.line, unfinished.start, named | {unfinished.rollout_id})

    def _damage(self, number: int, raw: bytes, lines: BinaryIO) -> Damage | None:
        """What a loss of power or a kill left from this line on; None if somebody else wrote it."""
        # A row begins with a brace, so what else stands there is not ours to cut off.
        if raw.startswith(b"{") and not raw.endswith(b"\n") and b"\0" not in raw and not _is_json(raw):
            return Damage(number, self.end, frozenset())
        if b"\0" not in raw or not raw.startswith((b"{", b"\0")):
            return None
        tail = raw + lines.read()
        if _FOREIGN.search(tail):
            return None
        return Damage(number, self.end, frozenset(name.decode() for name in _NAMED_ROLLOUT.findall(tail)))


@contextlib.contextmanager
def _positioned(descriptor: int) -> Iterator[None]:
    """Let ``pwrite`` write at its offset: with ``O_APPEND``, Linux appends instead."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_APPEND)
    try:
        yield
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


def _is_json(raw: bytes) -> bool:
    try:
        json.loads(raw)
    except ValueError:
        return False
    return True
