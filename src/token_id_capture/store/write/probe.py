"""Whether a write would succeed now, found out by making a small one."""

from __future__ import annotations

from token_id_capture.errors import StorageFullError
from token_id_capture.store.write.process import see
from token_id_capture.store.write.queue import Batch, Job


def probe(batch: Batch, jobs: list[Job]) -> None:
    """Note that this writer was seen; or, where a put would be refused, refuse as it does."""
    if batch.shortage:
        for job in jobs:
            job.error = StorageFullError(batch.shortage)
    else:
        see(batch.connection, batch.writer_id, batch.now)
