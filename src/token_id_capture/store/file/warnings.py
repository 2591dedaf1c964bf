"""The warnings that a store gives, each with a class of its own so that it can be filtered."""

from __future__ import annotations

import warnings


class StoreWarning(UserWarning):
    """Base of the store's warnings."""


class PinnedWalWarning(StoreWarning):
    """A reader keeps the write-ahead log from being emptied, so it grows."""


class UnknownFileSystemWarning(StoreWarning):
    """The database lies on a file system of which nobody here knows whether WAL mode is safe on it."""


class VolatileStorageWarning(StoreWarning):
    """The database lies in memory: a restart of the machine loses it."""


def warn(message: str, category: type[StoreWarning]) -> None:
    """Warn, and never raise: these come from the writer thread, which must continue."""
    try:
        warnings.warn(message, category, stacklevel=3)
    except StoreWarning:
        # The filter "error" is on; the caller of the filter wants to stop, the writer cannot.
        return
