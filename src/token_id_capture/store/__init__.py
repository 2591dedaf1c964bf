"""The durable store: one SQLite file in WAL mode, written by every server process of a machine.

README.md in this folder draws the write path and lists guarantees and limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from token_id_capture.records import validate_rollout_id
from token_id_capture.store.listing import RolloutFilter
from token_id_capture.store.location import DATABASE_NAME
from token_id_capture.store.queries import (
    CallSummary,
    FlagSummary,
    IntentSummary,
    LateWriteSummary,
    OutcomeSummary,
    RolloutDetail,
    RolloutSummary,
)
from token_id_capture.store.store import TokenCaptureStore
from token_id_capture.store.warnings import (
    PinnedWalWarning,
    StoreWarning,
    VolatileStorageWarning,
    WalResetBugWarning,
)

__all__ = [
    "CallSummary",
    "FlagSummary",
    "IntentSummary",
    "LateWriteSummary",
    "OutcomeSummary",
    "PinnedWalWarning",
    "RolloutDetail",
    "RolloutFilter",
    "RolloutSummary",
    "StoreWarning",
    "TokenCaptureStore",
    "VolatileStorageWarning",
    "WalResetBugWarning",
    "make_token_store",
    "validate_rollout_id",
]


def make_token_store(config: Mapping[str, Any]) -> TokenCaptureStore | None:
    """The store that a global configuration means; nothing is opened yet.

    None when capture is off, when a custom sink owns the records, or when no directory is
    configured.

    Raises:
        ValueError: the block ``token_id_capture`` is malformed.
    """
    from token_id_capture.config import TokenIdCaptureConfig

    settings = TokenIdCaptureConfig.model_validate(config)
    directory = settings.resolved_dir()
    if not settings.enabled or settings.token_id_capture.sink is not None or directory is None:
        return None
    # A directory whose name has a suffix must not be taken for a file.
    return TokenCaptureStore(directory / DATABASE_NAME)
