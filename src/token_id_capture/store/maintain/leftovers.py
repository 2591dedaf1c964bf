"""Temporary files and folders of processes that were killed before they could remove them.

The process that makes one holds a lock on it while it works. The kernel frees the lock with the process,
so what nobody holds is left behind, in whichever container its process ran.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold a file or folder as one that is in use. It may be removed inside the block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def abandoned(directory: Path, pattern: str) -> list[Path]:
    """What matches ``pattern`` in ``directory`` and nobody holds; empty where it cannot be read."""
    with contextlib.suppress(OSError):
        return [path for path in sorted(directory.glob(pattern)) if _is_free(path)]
    return []


def _is_free(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
