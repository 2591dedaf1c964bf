"""A store for commands that only look: no writer is started, so nothing waits for them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from token_id_capture.cli.common import existing_store

if TYPE_CHECKING:
    from pathlib import Path

    from token_id_capture.store import TokenCaptureStore


@asynccontextmanager
async def reading_store(database: Path) -> AsyncIterator[TokenCaptureStore]:
    """The store of an existing database. Entering it opens nothing: each query opens for itself.

    A file of an older release is still brought up to date, by the first query.
    """
    store = existing_store(database)
    try:
        yield store
    finally:
        await store.close()
