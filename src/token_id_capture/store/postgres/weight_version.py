"""The weight version that a trainer has stamped, in a row that every process of every host reads."""

from __future__ import annotations

import time
from typing import Final

import psycopg

from token_id_capture.store.postgres.errors import translated
from token_id_capture.store.postgres.session import connect
from token_id_capture.store.server_url import ServerUrl

REFRESH_SECONDS: Final = 1.0
"""How often a process without work looks."""

TRUSTED_SECONDS: Final = 2.5
"""How old a look may be that is believed. A stamp returns after that time, so nobody believes an earlier one then."""

_WRITE: Final = """
    INSERT INTO weight_version (only_row, version) VALUES (1, :version)
    ON CONFLICT (only_row) DO UPDATE SET version = excluded.version
"""


class WeightVersionRow:
    """Asking costs no look at the database: the writer looks whenever it is there."""

    def __init__(self, url: ServerUrl) -> None:
        self._url = url
        self._seen: tuple[float, str | None] = float("-inf"), None

    def see(self, looked_at: float, version: str | None) -> None:
        """Remember what a look began to find at this time of the monotonic clock."""
        self._seen = looked_at, version

    def read(self) -> str | None:
        """The version that is stamped now; None if there is none, or if the database was not seen of late."""
        looked_at, version = self._seen
        return version if time.monotonic() - looked_at <= TRUSTED_SECONDS else None

    def write(self, version: str | None) -> None:
        """Stamp what is captured from now on, or stop it. Blocks until every process knows.

        Raises:
            OSError: the server cannot be reached, or does not take it.
        """
        try:
            connection = connect(self._url)
            try:
                connection.execute(_WRITE, {"version": version})
                self.see(time.monotonic(), version)
            finally:
                connection.close()
        except psycopg.Error as error:
            raise OSError(0, str(translated(error, self._url))) from error
        time.sleep(TRUSTED_SECONDS)
