"""Read a database as a whole, wherever it is, without a store: nothing is written, and no writer is started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from token_id_capture.store.driver import Connection
from token_id_capture.store.file.location import database_path
from token_id_capture.store.file.read_only import needs_a_writer as file_needs_a_writer
from token_id_capture.store.file.read_only import read_only
from token_id_capture.store.server_url import ServerUrl, is_server_url, server_url

Location: TypeAlias = Path | ServerUrl


def location_of(database: str | Path | ServerUrl) -> Location:
    """The file or the server that ``database`` names, as ``TokenCaptureStore`` takes it.

    Raises:
        UnusableDatabaseError: it names neither.
    """
    if isinstance(database, Path) or not is_server_url(database):
        return database_path(str(database))
    return server_url(database)


def needs_a_writer(location: Location) -> bool:
    """Whether the database must be opened for writing once: it is older, or its creation was cut short.

    Raises:
        UnusableDatabaseError: it is missing, or cannot be used.
    """
    if isinstance(location, ServerUrl):
        from token_id_capture.store.postgres.direct import is_older

        return is_older(location)
    return file_needs_a_writer(location)


@contextmanager
def reading(location: Location) -> Iterator[Connection]:
    """A connection that cannot change the database. Its statements commit by themselves.

    Raises:
        UnusableDatabaseError: it is missing, or cannot be used; errors of the driver inside the block are translated.
    """
    if isinstance(location, ServerUrl):
        from token_id_capture.store.postgres.direct import read_only_server

        with read_only_server(location) as server:
            yield server
    else:
        with read_only(location) as file:
            yield file
