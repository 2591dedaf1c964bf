"""What an error of the server means: try again, give up, or tell somebody."""

from __future__ import annotations

from typing import Final

import psycopg

from token_id_capture.errors import InvalidEntryError, StorageFullError, StoreError, UnusableDatabaseError
from token_id_capture.store.server_url import ServerUrl

# https://www.postgresql.org/docs/current/errcodes-appendix.html
_UNDONE: Final = ("40001", "40P01", "55P03")
"""The transaction was rolled back, and may succeed next time: serialization, deadlock, a lock that was not free."""
_GONE: Final = ("08", "57P01", "57P02", "57P03", "57P05", "25P03", "25006", "53300")
"""The connection, or the server, is of no use now: lost, shut down, starting, idle for too long, a standby, full."""
_FULL: Final = ("53100", "53200")
_REFUSED: Final = ("28", "3D", "42501", "3F")


def is_undone(error: BaseException) -> bool:
    """Whether the transaction certainly left nothing behind, and may be done again on the same connection."""
    return isinstance(error, psycopg.Error) and _state(error).startswith(_UNDONE)


def is_gone(error: BaseException) -> bool:
    """Whether another connection may succeed, now or in a moment."""
    if not isinstance(error, psycopg.OperationalError | psycopg.InterfaceError | psycopg.InternalError):
        return False
    state = _state(error)
    # Without a code it is the client's own: no connection, or a lost one. What a server refuses at the door it says
    # in a message alone.
    return state.startswith(_GONE) if state else not _is_refusal(error)


def _is_refusal(error: psycopg.Error) -> bool:
    words = ("authentication failed", "does not exist", "no pg_hba.conf entry", "no password supplied", "invalid ")
    return any(word in str(error) for word in words)


def translated(error: BaseException, url: ServerUrl) -> StoreError | InvalidEntryError | None:
    """This package's error for an error of the driver, or None if it is none of the driver's."""
    if not isinstance(error, psycopg.Error):
        return None
    text = url.without_secrets(" ".join(str(error).split()))
    state = _state(error)
    if state.startswith(_FULL):
        return StorageFullError(f"no room in {url} ({text}): nothing was stored. Free some space, then try again.")
    if state.startswith(_REFUSED) or (not state and _is_refusal(error)):
        return UnusableDatabaseError(f"cannot use {url}: {text}")
    if isinstance(error, psycopg.DataError):
        return InvalidEntryError(f"PostgreSQL cannot store this: {text}")
    return StoreError(f"{url}: {text}" + (f" ({state})" if state else ""))


def _state(error: psycopg.Error) -> str:
    return error.sqlstate or ""
