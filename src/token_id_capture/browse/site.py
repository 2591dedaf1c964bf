"""Datasette on one capture database, as an ASGI application."""

from __future__ import annotations

import asyncio
import sqlite3
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from datasette.app import Datasette
from datasette.database import Database
from datasette.plugins import pm

from token_id_capture.browse import plugin
from token_id_capture.browse.queries import describe_database
from token_id_capture.store.file.read_only import connect
from token_id_capture.view.access import KeyRequired

DATABASE: Final = "captures"
"""The name of the database in the addresses of the pages, whatever the file is called."""

_COUNTING_MILLISECONDS: Final = 200

_SETTINGS: Final = {
    # A query pins the write-ahead log for as long as it runs.
    "sql_time_limit_ms": 3_000,
    "default_page_size": 50,
    "truncate_cells_html": 300,
    # Suggestions would cost a scan of the table each.
    "suggest_facets": False,
    # The file alone is not the database: its latest rows are in the write-ahead log.
    "allow_download": False,
    "default_cache_ttl": 0,
}


class CaptureDatabase(Database):  # type: ignore[misc]
    """A live database that others write. Every connection reads only, and there is none to write with."""

    def connect(self, write: bool = False) -> sqlite3.Connection:
        """A read-only connection.

        Raises:
            PermissionError: it is wanted for writing.
        """
        if write:
            raise PermissionError(f"{self.path} is only looked at here")
        connection = connect(Path(self.path), check_same_thread=False)
        self._all_file_connections.append(connection)
        return connection

    async def execute(self, sql: str, params: Any = None, **options: Any) -> Any:
        """As Datasette does, but an error in a statement goes to its author, not to this log."""
        if not options and sql.startswith("select count(*) "):
            # How many rows there are behind those of a page, which can do without.
            options["custom_time_limit"] = _COUNTING_MILLISECONDS
        return await super().execute(sql, params, **{**options, "log_sql_errors": False})


def make_site(path: Path, key: str) -> Any:
    """The application that shows this database file to anyone with the key."""
    # Where rich is installed, Datasette prints a traceback with all variables for every page not found.
    import_module("datasette.handle_exception").rich = None  # type: ignore[attr-defined]
    if not pm.is_registered(plugin):
        pm.register(plugin, name=plugin.__name__)
    datasette = Datasette(
        [],
        settings=_SETTINGS,
        metadata={
            "title": path.name,
            "description": "Captured tokens of agent rollouts, read-only. Begin with the queries.",
            "databases": {DATABASE: describe_database()},
        },
    )
    datasette.add_database(CaptureDatabase(datasette, path=str(path), is_mutable=True), name=DATABASE)
    asyncio.run(datasette.invoke_startup())
    return KeyRequired(datasette.app(), key, "tokcap browse")
