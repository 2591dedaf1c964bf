"""An output that appears under its name only when it is whole and on disk."""

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
    """Write to a temporary file beside ``path``, which gets the name when the block ends well.

    Without ``may_replace`` what is there already is never replaced. Whatever goes wrong, an
    interrupt included, leaves ``path`` as it was and nothing beside it.

    Raises:
        UnusableOutputError: it cannot be written, or something is there already.
    """
    _refuse_existing(path, may_replace)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with _create(temporary) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        _publish(temporary, path, may_replace)
        sync_directory(path)
    except OSError as error:
        raise UnusableOutputError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


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
        _refuse_existing(path, may_replace)
        temporary.replace(path)  # a file system without hard links


def _refuse_existing(path: Path, may_replace: Callable[[Path], bool]) -> None:
    if path.is_dir():
        raise UnusableOutputError(f"{path} is a directory: name a file in it")
    if os.path.lexists(path) and not may_replace(path):
        raise UnusableOutputError(f"{path} is there already and is not replaced: name a new file")


def sync_directory(path: Path) -> None:
    """Make the name of this file durable."""
    descriptor = os.open(path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
