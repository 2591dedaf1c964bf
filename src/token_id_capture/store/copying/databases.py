"""Copy rollouts between two databases that are named."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from token_id_capture.errors import StoreError
from token_id_capture.records import validate_rollout_id
from token_id_capture.store.copying.file_side import file_source, file_target
from token_id_capture.store.copying.run import Copied, copy_rollouts
from token_id_capture.store.copying.sides import Source, Target
from token_id_capture.store.file.location import database_path
from token_id_capture.store.maintain.verification import Progress
from token_id_capture.store.server_url import is_server_url, server_url


def copy_database(
    source: str | Path,
    target: str | Path,
    rollout_ids: Sequence[str] = (),
    *,
    include_open: bool = False,
    copied: Copied | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Copied:
    """Copy these rollouts, or all, from one database to another, which is made if it is missing.

    Arguments and errors are those of ``copy_rollouts``; databases are named as for ``TokenCaptureStore``.

    Raises:
        ValueError: a rollout id is invalid.
        StoreError: both are the same database.
        UnusableDatabaseError: one of them is missing or cannot be used.
    """
    for rollout_id in rollout_ids:
        validate_rollout_id(rollout_id)
    with _source(source) as here, _target(target) as there:
        if here.identity() == there.identity():
            raise StoreError(f"{there} is the source itself: name another database to copy to")
        return copy_rollouts(here, there, rollout_ids, include_open=include_open, copied=copied, progress=progress)


# The driver of a server is an extra, so what needs it is imported for a server alone.


def _source(database: str | Path) -> AbstractContextManager[Source]:
    if not is_server_url(database):
        return file_source(database_path(database))
    from token_id_capture.store.copying.server_side import server_source

    return server_source(server_url(str(database)))


def _target(database: str | Path) -> AbstractContextManager[Target]:
    if not is_server_url(database):
        return file_target(database_path(database))
    from token_id_capture.store.copying.server_side import server_target

    return server_target(server_url(str(database)))
