"""Outputs that appear under their names only when they are whole and on disk."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from token_id_capture.errors import TokenCaptureError


class UnusableOutputError(TokenCaptureError):
    """The output cannot be written, or holds what a command must not change."""


def _never(path: Path) -> bool:
    return False


@contextmanager
def whole_file(path: Path, may_replace: Callable[[Path], bool] = _never) -> Iterator[BinaryIO]:
    """One file of ``whole_files``."""
    with whole_files(may_replace) as open_file:
        yield open_file(path)


@contextmanager
def whole_files(may_replace: Callable[[Path], bool] = _never) -> Iterator[Callable[[Path], BinaryIO]]:
    """A function that opens the next file, of which the one before is complete then.

    Each is written to a temporary file beside its path; when the block ends well they get their names, one after the
    other. Without ``may_replace`` what is there already is never replaced. Whatever goes wrong, an interrupt
    included, leaves every path as it was and nothing beside it.

    Raises:
        UnusableOutputError: one cannot be written, or something is there already.
    """
    files = _Files(may_replace)
    try:
        yield files.open
        files.publish()
    except OSError as error:
        raise UnusableOutputError(f"cannot write {files.path}: {error.strerror or error}") from error
    finally:
        files.clean_up()


class _Files:
    """Files that are written and not yet published; ``path`` is the one that is being worked on."""

    def __init__(self, may_replace: Callable[[Path], bool]) -> None:
        self.path = Path()
        self._may_replace = may_replace
        self._temporary: dict[Path, Path] = {}
        self._stream: BinaryIO | None = None

    def open(self, path: Path) -> BinaryIO:
        """Complete the file before, and create the next one."""
        self._complete()
        self.path = path
        refuse_existing(path, self._may_replace)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
        self._stream = _create(temporary)
        self._temporary[path] = temporary
        return self._stream

    def publish(self) -> None:
        """Give every file its name."""
        self._complete()
        for path, temporary in self._temporary.items():
            self.path = path
            _publish(temporary, path, self._may_replace)
        for directory in {path.absolute().parent for path in self._temporary}:
            _sync(directory)

    def clean_up(self) -> None:
        """Remove what did not get its name."""
        if self._stream is not None:
            # What it still holds is for nobody, so a disk that is full matters no more.
            with contextlib.suppress(OSError):
                self._stream.close()
        for temporary in self._temporary.values():
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _complete(self) -> None:
        if self._stream is not None:
            with self._stream as stream:
                stream.flush()
                os.fsync(stream.fileno())
            self._stream = None


def _create(temporary: Path) -> BinaryIO:
    return open(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")


def _publish(temporary: Path, path: Path, may_replace: Callable[[Path], bool]) -> None:
    if path.exists() and may_replace(path):
        temporary.replace(path)
        return
    try:
        # Unlike a rename, a link never replaces what somebody put there meanwhile.
        os.link(temporary, path)
    except OSError:
        refuse_existing(path, may_replace)
        temporary.replace(path)  # a file system without hard links


def refuse_existing(path: Path, may_replace: Callable[[Path], bool] = _never) -> None:
    """Raises:
    UnusableOutputError: something is there that must not be replaced.
    """
    if path.is_dir():
        raise UnusableOutputError(f"{path} is a directory: name a file in it")
    if os.path.lexists(path) and not may_replace(path):
        raise UnusableOutputError(f"{path} is there already and is not replaced: name a new file")


def sync_directory(path: Path) -> None:
    """Make the name of this file durable."""
    _sync(path.absolute().parent)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
