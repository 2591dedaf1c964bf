"""Every error that this package raises on purpose.

::

    TokenCaptureError (Exception)
    ├── StoreError (RuntimeError)            the database said no
    │   ├── RolloutFrozenError               a new record for a rollout that was frozen already
    │   ├── RolloutRetiredError              a record for a rollout that was delivered and deleted
    │   ├── StoreClosedError                 the store was closed, or its writer failed
    │   ├── StorageFullError                 no room for a commit; nothing was stored
    │   └── UnusableDatabaseError            the file cannot be opened as a capture database
    │       ├── NewerSchemaError             written by a newer release of this package
    │       ├── ReplacedDatabaseError        not the file any more that this store has worked with
    │       └── UnsupportedFileSystemError   WAL mode would lose data there
    ├── ConflictingEntryError (ValueError)   one call id, two payloads
    ├── CorruptCaptureError (ValueError)     stored tokens do not match their digest
    ├── InvalidEntryError (ValueError)       token data that nobody could train on
    ├── StatementError (ValueError)          an SQL statement that is refused or cannot be run
    ├── UnknownRolloutError (LookupError)    no row of this rollout exists
    ├── HandOffError (RuntimeError)          a gateway cannot be reached, or does not hand off
    └── ConfigurationError (ValueError)      settings that contradict each other

Each class also has the builtin parent that callers of the file-based peer store catch
(``ValueError`` or ``RuntimeError``). Every message says what happened, to which rollout and call,
and what to do next.
"""

from __future__ import annotations


class TokenCaptureError(Exception):
    """Base of all errors of this package."""


class StoreError(TokenCaptureError, RuntimeError):
    """The store could not do what was asked."""


class RolloutFrozenError(StoreError):
    """A new record arrived after the rollout was frozen."""

    def __init__(self, rollout_id: str, model_call_id: str) -> None:
        super().__init__(
            f"rollout {rollout_id!r} is already frozen, so call {model_call_id!r} was not stored; "
            "its snapshot stays as it was. Use a new rollout id for a new attempt."
        )


class RolloutRetiredError(StoreError):
    """A record arrived after the rollout was retired."""

    def __init__(self, rollout_id: str, action: str) -> None:
        super().__init__(
            f"rollout {rollout_id!r} is retired, so {action} was refused. "
            "Use a new rollout id, or delete this one before its id is used again."
        )


class StoreClosedError(StoreError):
    """The store is closed, or its writer ended on an error it could not recover from."""


class StorageFullError(StoreError):
    """There is no room for this write. Nothing of it was stored; try again when there is room."""


class UnusableDatabaseError(StoreError):
    """The file is not a capture database, or cannot be opened as one."""


class NewerSchemaError(UnusableDatabaseError):
    """The file was written by a newer release of this package."""


class ReplacedDatabaseError(UnusableDatabaseError):
    """The file was removed, replaced or cut short while a store worked with it; only a new store can continue."""


class UnsupportedFileSystemError(UnusableDatabaseError):
    """The file lies on a file system on which WAL mode loses data."""


class ConflictingEntryError(TokenCaptureError, ValueError):
    """One call id was used for two different payloads; the rollout is flagged incomplete."""

    def __init__(self, rollout_id: str, model_call_id: str) -> None:
        super().__init__(
            f"call {model_call_id!r} of rollout {rollout_id!r} was reused with a different payload; "
            "the first payload is kept and the rollout is flagged incomplete."
        )


class CorruptCaptureError(TokenCaptureError, ValueError):
    """Stored tokens do not match the digest that was stored with them."""


class InvalidEntryError(TokenCaptureError, ValueError):
    """Token data that cannot be trained on: wrong type, wrong range, or not a number."""


class StatementError(TokenCaptureError, ValueError):
    """An SQL statement that does more than read, or that cannot be run."""


class UnknownRolloutError(TokenCaptureError, LookupError):
    """The database has no row of this rollout."""


class HandOffError(TokenCaptureError, RuntimeError):
    """A gateway could not be reached, refused the key, or sent what is not whole."""


class ConfigurationError(TokenCaptureError, ValueError):
    """Settings that contradict each other, or name something that cannot be used."""
