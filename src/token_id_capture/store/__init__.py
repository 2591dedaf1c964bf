"""The durable store: one SQLite file in WAL mode, written by every server process of a machine.

README.md in this folder draws the write path and lists guarantees and limits. What needs more
than the standard library loads on first use, as commands that only look at a file need little of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from token_id_capture.store.file.location import DATABASE_NAME
from token_id_capture.store.file.warnings import (
    PinnedWalWarning,
    StoreWarning,
    UnknownFileSystemWarning,
    VolatileStorageWarning,
)

if TYPE_CHECKING:
    from token_id_capture.records import validate_rollout_id
    from token_id_capture.store.read.listing import RolloutFilter
    from token_id_capture.store.read.summaries import CallSummary, RolloutDetail, RolloutSummary
    from token_id_capture.store.store import TokenCaptureStore

__all__ = [
    "CallSummary",
    "PinnedWalWarning",
    "RolloutDetail",
    "RolloutFilter",
    "RolloutSummary",
    "StoreWarning",
    "TokenCaptureStore",
    "UnknownFileSystemWarning",
    "VolatileStorageWarning",
    "make_token_store",
    "validate_rollout_id",
]

_LAZY: Final = {
    "CallSummary": "token_id_capture.store.read.summaries",
    "RolloutDetail": "token_id_capture.store.read.summaries",
    "RolloutFilter": "token_id_capture.store.read.listing",
    "RolloutSummary": "token_id_capture.store.read.summaries",
    "TokenCaptureStore": "token_id_capture.store.store",
    "validate_rollout_id": "token_id_capture.records",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def make_token_store(config: Mapping[str, Any]) -> TokenCaptureStore | None:
    """The store that a global configuration means; nothing is opened yet.

    None when capture is off, when a custom sink owns the records, or when no directory is
    configured.

    Raises:
        ValueError: the block ``token_id_capture`` is malformed.
    """
    from token_id_capture.config import TokenIdCaptureConfig
    from token_id_capture.store.store import TokenCaptureStore

    settings = TokenIdCaptureConfig.model_validate(config)
    directory = settings.resolved_dir()
    if not settings.enabled or settings.token_id_capture.sink is not None or directory is None:
        return None
    # A directory whose name has a suffix must not be taken for a file.
    return TokenCaptureStore(directory / DATABASE_NAME)
