"""The database that a command works on which needs no store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from token_id_capture.cli.options import existing_store, fail, run

if TYPE_CHECKING:
    from pathlib import Path

    from token_id_capture.store.driver import Connection


def database_file(database: str, instead: str) -> Path:
    """The file that ``--database`` means; ends the command for a server, where ``instead`` says what to use."""
    from token_id_capture.store.reading import location_of
    from token_id_capture.store.server_url import ServerUrl

    location = location_of(database)
    if isinstance(location, ServerUrl):
        fail(f"this command is for a database in a file: {instead}")
    return location


@contextmanager
def reading(database: str) -> Iterator[Connection]:
    """A connection for a command that only looks: no writer is started, so nothing waits for it.

    A database of an older release, or one whose creation was cut short, is brought up to date first.
    """
    from token_id_capture.store import reading as source

    location = source.location_of(database)
    if source.needs_a_writer(location):
        run(_upgrade(database))
    with source.reading(location) as connection:
        yield connection


async def _upgrade(database: str) -> None:
    async with existing_store(database):
        pass
