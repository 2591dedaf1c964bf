"""Open the database of a process that writes: check where it lies, create it, bring it up to date."""

from __future__ import annotations

import contextlib
from pathlib import Path

from sqlalchemy import Engine

from token_id_capture.store.file.connections import create_file, translated, writing_engine
from token_id_capture.store.file.location import check_file_system, missing
from token_id_capture.store.file.lock import WriterLock, empty, was_emptied
from token_id_capture.store.file.migrate import migrate
from token_id_capture.store.file.revision import HEAD_REVISION, file_revision, refuse_newer


def open_for_writing(path: Path, writer_lock: WriterLock, *, create: bool, writer_lock_held: bool = False) -> Engine:
    """An engine on an up-to-date database. Many processes may do this at once.

    Raises:
        UnusableDatabaseError: the file is missing and ``create`` is false, or cannot be used.
        NewerSchemaError: a newer release wrote the file.
        UnsupportedFileSystemError: WAL mode is not safe where the file lies.
    """
    check_file_system(path)
    engine: Engine | None = None
    try:
        exists = path.exists()
        if not exists and not create:
            raise missing(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # The usual case, a file that is up to date, needs no lock.
        current = exists and path.stat().st_size > 0 and file_revision(path) == HEAD_REVISION
        engine = writing_engine(path)
        if not current:
            with contextlib.nullcontext() if writer_lock_held else writer_lock:
                if exists and not path.stat().st_size and (not create or was_emptied(path)):
                    raise empty(path)
                create_file(path)
                migrate(engine, path)
    except Exception as error:
        if engine is not None:
            engine.dispose()
        problem = translated(error, path)
        if problem is not None:
            raise problem from error
        raise
    return engine


def is_current(path: Path, *, create: bool) -> bool:
    """Whether the file is there and up to date, so that nobody has to open it for writing first.

    Raises:
        UnusableDatabaseError: it is missing and ``create`` is false, or cannot be used.
        NewerSchemaError: a newer release wrote the file.
    """
    if not path.exists():
        if create:
            return False
        raise missing(path)
    try:
        revision = file_revision(path)
    except Exception as error:
        raise translated(error, path) or error from error
    refuse_newer(revision, path)
    return revision == HEAD_REVISION
