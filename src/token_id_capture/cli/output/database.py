"""The file that a command works on which needs no store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3
    from pathlib import Path


def database_file(database: str) -> Path:
    """The file that ``--database`` means."""
    from token_id_capture.store.file.location import database_path

    return database_path(database)


@contextmanager
def reading(database: str) -> Iterator[sqlite3.Connection]:
    """A connection for a command that only looks: no writer is started, so nothing waits for it.

    A file of an older release, or one whose creation was cut short, is brought up to date first.
    """
    from token_id_capture.store.file.read_only import needs_a_writer, read_only

    path = database_file(database)
    if needs_a_writer(path):
        _upgrade(path)
    with read_only(path) as connection:
        yield connection


def _upgrade(path: Path) -> None:
    from token_id_capture.cli.options import existing_store, run

    async def open_and_close() -> None:
        async with existing_store(str(path)):
            pass

    run(open_and_close())
