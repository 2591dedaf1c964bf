"""What ``fork`` must not find: an open connection, or the writer lock.

The kernel gives a child none of its parent's file locks, while SQLite, whose memory the child
inherits, believes that it holds them. Another process may then delete the write-ahead log that the
child writes to, and with it what the child has acknowledged. So all connections of this package are
closed before a fork, and each process opens again at its next use. The lock file is closed as well,
since a child would keep the writer lock of a parent that is killed while it holds it.

A read that is under way cannot be waited for. Then the child cannot use that database, and says so.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final, Protocol
from weakref import WeakSet

from token_id_capture.errors import StoreError

logger = logging.getLogger(__name__)


class Forkable(Protocol):
    """Holds connections to one database."""

    @property
    def path(self) -> Path:
        """The database file."""
        ...

    def close_for_fork(self) -> bool:
        """Close all connections and open none until the fork is over; False if one is in use."""
        ...

    def go_on_after_fork(self) -> None:
        """Called in the parent: connections may be opened again."""
        ...


_watched: Final[WeakSet[Forkable]] = WeakSet()
_closed: Final[list[Forkable]] = []
_open_at_fork: Final[set[Path]] = set()
_inherited: Final[set[Path]] = set()


def watch(holder: Forkable) -> None:
    """Have the connections of ``holder`` closed before every fork, for as long as it lives."""
    _watched.add(holder)


def refuse_inherited(path: Path) -> None:
    """Refuse a database that was being read when this process was forked.

    Raises:
        StoreError: it was.
    """
    if _inherited and path in _inherited:
        raise StoreError(
            f"this process was forked while {path} was being read, so this process cannot rely on SQLite's locks on "
            f"it: fork while nothing is read, or use the start method spawn"
        )


def _before() -> None:
    for holder in list(_watched):
        _closed.append(holder)
        try:
            closed = holder.close_for_fork()
        except Exception:
            logger.exception("a connection to %s could not be closed for a fork", holder.path)
            closed = False
        if not closed:
            _open_at_fork.add(holder.path)


def _after_in_parent() -> None:
    for holder in _closed:
        holder.go_on_after_fork()
    _closed.clear()
    _open_at_fork.clear()


def _after_in_child() -> None:
    # The parent's threads are not here, and what they held is not used again in this process.
    _inherited.update(_open_at_fork)
    _watched.clear()
    _closed.clear()
    _open_at_fork.clear()


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
