"""Copy rollouts between two databases that are named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from token_id_capture.errors import StoreError
from token_id_capture.records import validate_rollout_id
from token_id_capture.store.copying.file_side import file_source, file_target
from token_id_capture.store.copying.run import Copied, copy_rollouts
from token_id_capture.store.file.location import database_path
from token_id_capture.store.maintain.verification import Progress


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
    from_path, to_path = database_path(source), database_path(target)
    if from_path == to_path or (from_path.exists() and to_path.exists() and from_path.samefile(to_path)):
        raise StoreError(f"{to_path} is the source itself: name another database to copy to")
    with file_source(from_path) as here, file_target(to_path) as there:
        return copy_rollouts(here, there, rollout_ids, include_open=include_open, copied=copied, progress=progress)
